"""Which OpenGL draws without a screen: EGL, else OSMesa. Must be decided before MuJoCo is imported.

Knows system libraries only, by ctypes: PyOpenGL and MuJoCo keep the first answer they are given, so
they cannot be asked to try.
"""

from __future__ import annotations

import ctypes
import os
import sys

VARIABLE = "MUJOCO_GL"

_EGL_PLATFORM_DEVICE_EXT = 0x313F
_GL_RGBA = 0x1908
_MAX_DEVICES = 16
_OSMESA_LIBRARIES = ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")


class RenderingUnavailable(OSError):
    """This machine cannot draw off screen; the message says what to install."""


def choose_opengl() -> str | None:
    """Sets MUJOCO_GL if nobody has. Returns it, or None where MuJoCo needs no choice (not Linux).

    What the user set stands. Call it before the first import of mujoco.
    """
    if chosen := os.environ.get(VARIABLE):
        return chosen
    if not sys.platform.startswith("linux"):
        return None
    for name, works in (("egl", egl_works), ("osmesa", osmesa_works)):
        if works():
            os.environ[VARIABLE] = name
            return name
    raise RenderingUnavailable(
        "No OpenGL that draws without a screen was found: EGL has no device and OSMesa is not "
        "installed. On Debian or Ubuntu: apt install libegl1 libgl1 (or libosmesa6, slower)."
    )


def egl_works() -> bool:
    """Whether EGL has a device that can be opened, the way MuJoCo will open it."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    query = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    get_display = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
    if not query or not get_display:
        return False
    devices, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int()
    pointer = ctypes.c_void_p
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, pointer, pointer)(query)
    platform_display = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(get_display)
    if not query_devices(_MAX_DEVICES, ctypes.byref(devices), ctypes.byref(count)):
        return False
    egl.eglInitialize.argtypes = (pointer, pointer, pointer)
    for device in devices[: count.value]:
        display = platform_display(_EGL_PLATFORM_DEVICE_EXT, device, None)
        if display and egl.eglInitialize(display, None, None):
            return True
    return False


def osmesa_works() -> bool:
    """Whether OSMesa is installed and gives a context."""
    for name in _OSMESA_LIBRARIES:
        try:
            osmesa = ctypes.CDLL(name)
        except OSError:
            continue
        osmesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
        context = osmesa.OSMesaCreateContextExt(_GL_RGBA, 24, 8, 0, None)
        if context:
            osmesa.OSMesaDestroyContext(ctypes.c_void_p(context))
            return True
    return False

"""Off-screen images of a MuJoCo world, and the environments that are made of one.

One thread per process owns OpenGL, because a context belongs to a thread: environments may be
rendered from any thread, and contexts of other libraries are not disturbed. Everything that was
compiled from the same XML shares one set of meshes in OpenGL, so a hundred environments cost no
more than one.

OpenGL usually runs on the CPU here, where a frame must take milliseconds. So there are no shadows,
geoms outside the camera's view are not sent, and edges are smoothed by rendering at twice the size
and averaging, which is three times faster on a CPU than OpenGL's own antialiasing. Most of the time
goes into the triangles of meshes, which are far smaller than a pixel: corners within a millimetre
are drawn as one. Sites are never rendered: they are the simulator's markers, and some mark the
goal.
"""

from __future__ import annotations

import abc
import copy
import ctypes
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from piston.sim.environment import Environment, Observation

VARIABLE = "MUJOCO_GL"

_EGL_PLATFORM_DEVICE_EXT = 0x313F
_GL_RGBA = 0x1908
_MAX_DEVICES = 16
_OPENGL_LIBRARIES = ("libOpenGL.so.0", "libGL.so.1")
_OSMESA_LIBRARIES = ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")
_INSTALL = (
    "On Debian or Ubuntu: apt install libegl1 libgl1 (or libosmesa6, slower). "
    "On Fedora: dnf install mesa-libEGL mesa-libGL."
)


class RenderingUnavailable(OSError):
    """This machine cannot render off screen; the message says what to install."""


def choose_opengl() -> str | None:
    """Set MUJOCO_GL unless the user has, and return it; None where MuJoCo needs no choice.

    MuJoCo reads the variable when it is imported. PyOpenGL and MuJoCo keep the first choice, so
    the system libraries are tried with ctypes instead.
    """
    candidates = {"egl": egl_works, "osmesa": osmesa_works}
    if chosen := os.environ.get(VARIABLE):
        works = candidates.get(chosen)
        if works is not None and not works():
            raise RenderingUnavailable(
                f"{VARIABLE}={chosen} is set, but {chosen} does not work on this machine. Unset it "
                f"to choose another one automatically, or install {chosen}. {_INSTALL}"
            )
        return chosen
    if not sys.platform.startswith("linux"):
        return None
    for name, works in candidates.items():
        if works():
            os.environ[VARIABLE] = name
            return name
    raise RenderingUnavailable(
        "No OpenGL that renders without a screen was found: EGL has no device or there is no "
        f"libGL, and OSMesa is not installed. {_INSTALL}"
    )


def egl_works() -> bool:
    """Return whether EGL has a device that can be opened as MuJoCo opens it, by PyOpenGL."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    if not any(map(_can_be_loaded, _OPENGL_LIBRARIES)):
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
    displays = (
        platform_display(_EGL_PLATFORM_DEVICE_EXT, device, None)
        for device in devices[: count.value]
    )
    return any(display and egl.eglInitialize(display, None, None) for display in displays)


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def osmesa_works() -> bool:
    """Return whether OSMesa is installed and creates a context."""
    for name in _OSMESA_LIBRARIES:
        try:
            osmesa = ctypes.CDLL(name)
        except OSError:
            continue
        osmesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
        if context := osmesa.OSMesaCreateContextExt(_GL_RGBA, 24, 8, 0, None):
            osmesa.OSMesaDestroyContext(ctypes.c_void_p(context))
            return True
    return False


_OPENGL = choose_opengl()
# Their lines on which bindings were found are of no use; warnings and errors are still logged.
for _chatty in ("OpenGL", "absl"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)
import mujoco  # noqa: E402  (reads MUJOCO_GL when it is imported)

_MAX_GEOMS = 2000
# Joint positions and mocap bodies: what an image depends on.
_POSE = int(
    mujoco.mjtState.mjSTATE_QPOS
    | mujoco.mjtState.mjSTATE_MOCAP_POS
    | mujoco.mjtState.mjSTATE_MOCAP_QUAT
)
_SMOOTHING = 2
# Side of the cells in which corners of a mesh are joined, in metres. Measured: half the triangles,
# 1.7 times faster, a mean difference of 0.2 of 255 from the exact picture.
_MESH_CELL = 0.001
_INITIAL_BUFFER = (_SMOOTHING * 240, _SMOOTHING * 320)
# Geoms of this group are not drawn by MuJoCo's default options.
_UNDRAWN_GROUP = 5
_BOX_CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")


class View(NamedTuple):
    """A named camera of the model. `field_of_view` is vertical, in degrees; None is the model's."""

    camera: str
    field_of_view: float | None = None


class World(NamedTuple):
    """A model, its state, and the name of the XML from which the model was compiled."""

    source: str
    model: mujoco.MjModel
    data: mujoco.MjData


class MujocoEnvironment(Environment):
    """An environment with one camera. Subclasses say which world it is."""

    # What `render` shows by default.
    overview: ClassVar[View]

    @abc.abstractmethod
    def _current(self) -> World:
        """Return the world as it is now."""

    @abc.abstractmethod
    def _sense(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the image of the robot's camera and the robot's state."""

    def observe(self) -> Observation:
        image, state = self._sense()
        (camera,) = self.cameras
        state = np.asarray(state, np.float32)
        return {"images": {camera: image}, "state": state, "prompt": self.prompt}

    def render(
        self, height: int = 480, width: int = 640, camera: str | None = None
    ) -> UInt8[np.ndarray, "h w 3"]:
        return self._render(View(camera) if camera else self.overview, height, width)

    def pose(self) -> Float[np.ndarray, " p"]:
        _, model, data = self._current()
        pose = np.empty(mujoco.mj_stateSize(model, _POSE))
        mujoco.mj_getState(model, data, pose, _POSE)
        return pose

    def set_pose(self, pose: Float[np.ndarray, " p"]) -> None:
        _, model, data = self._current()
        self.done = True
        mujoco.mj_setState(model, data, pose, _POSE)
        mujoco.mj_forward(model, data)

    def _render(self, view: View, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
        if height < 1 or width < 1:
            raise ValueError(f"An image needs at least one pixel, found {height}×{width}.")
        return _thread.submit(_draw, self._current(), view, height, width).result()


class _Canvas:
    """The OpenGL resources of one kind of world."""

    def __init__(self, model: mujoco.MjModel) -> None:
        drawn = _simplified(model)
        drawn.vis.quality.offsamples = 0
        self.context = mujoco.MjrContext(drawn, mujoco.mjtFontScale.mjFONTSCALE_100)
        self.buffer = (0, 0)
        self.scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self.options = mujoco.MjvOption()
        self.options.sitegroup[:] = 0


def _simplified(model: mujoco.MjModel) -> mujoco.MjModel:
    """Return a copy whose meshes have fewer triangles, to be drawn, not simulated.

    Corners in the same cell of a grid become one of them; triangles that lose their area are left
    out.
    """
    drawn = copy.copy(model)
    for mesh in range(model.nmesh):
        corners = slice(
            model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh]
        )
        begin, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        cells = np.round(model.mesh_vert[corners] / _MESH_CELL).astype(np.int64)
        _, chosen, cell_of = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        faces = cell_of.reshape(-1)[model.mesh_face[begin : begin + count]]
        kept = np.flatnonzero((faces != np.roll(faces, 1, axis=1)).all(axis=1))
        end = begin + len(kept)
        drawn.mesh_face[begin:end] = chosen[faces[kept]]
        for name in ("mesh_facenormal", "mesh_facetexcoord"):
            getattr(drawn, name)[begin:end] = getattr(model, name)[begin + kept]
        drawn.mesh_facenum[mesh] = len(kept)
    return drawn


# By the source of the world. Used on the render thread only.
_canvases: dict[str, _Canvas] = {}


def _draw(world: World, view: View, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    source, model, data = world
    viewpoint = mujoco.MjvCamera()
    viewpoint.type = mujoco.mjtCamera.mjCAMERA_FIXED
    viewpoint.fixedcamid = _camera_id(model, view.camera)
    _opengl()
    if source not in _canvases:
        _canvases[source] = _Canvas(model)
    canvas = _canvases[source]
    height, width = _SMOOTHING * height, _SMOOTHING * width
    buffer = tuple(map(max, (height, width), canvas.buffer, _INITIAL_BUFFER))
    if buffer != canvas.buffer:
        mujoco.mjr_resizeOffscreen(buffer[1], buffer[0], canvas.context)
        canvas.buffer = (buffer[0], buffer[1])
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, canvas.context)
    with _camera_set_up(model, data, viewpoint.fixedcamid, view.field_of_view, width / height):
        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, canvas.options, None, viewpoint, every, canvas.scene)
    rectangle = mujoco.MjrRect(0, 0, width, height)
    image = np.empty((height, width, 3), np.uint8)
    mujoco.mjr_render(rectangle, canvas.scene, canvas.context)
    mujoco.mjr_readPixels(image, None, rectangle, canvas.context)
    # OpenGL's rows go from the bottom to the top.
    return np.array(Image.fromarray(image[::-1]).reduce(_SMOOTHING))


@functools.cache
def _opengl() -> Any:
    """Create the context of this process and make it current on the render thread."""
    try:
        # By name: mujoco may have been imported before MUJOCO_GL was set.
        named = _OPENGL in ("egl", "osmesa")
        module: Any = importlib.import_module(f"mujoco.{_OPENGL}") if named else mujoco
        context = module.GLContext(_INITIAL_BUFFER[1], _INITIAL_BUFFER[0])
        context.make_current()
    except Exception as error:
        raise RenderingUnavailable(
            f"OpenGL could not create a context ({error}). Unset MUJOCO_GL to choose another one "
            f"automatically, or install one. {_INSTALL}"
        ) from error
    # Never freed: dm_control, which stock environments import, closes the display that both use at
    # exit, and freeing would then print errors. One more reference keeps __del__ from running.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    return context


def _camera_id(model: mujoco.MjModel, name: str) -> int:
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)
    if camera < 0:
        known = ", ".join(model.camera(i).name for i in range(model.ncam))
        raise ValueError(f"No camera is named {name!r}; this world has {known}.")
    return camera


@contextmanager
def _camera_set_up(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    camera: int,
    field_of_view: float | None,
    aspect: float,
) -> Iterator[None]:
    """Set the field of view and hide geoms that the camera cannot see; undo both at exit."""
    own_view = float(model.cam_fovy[camera])
    groups = model.geom_group.copy()
    try:
        if field_of_view is not None:
            model.cam_fovy[camera] = field_of_view
        model.geom_group[_out_of_sight(model, data, camera, aspect)] = _UNDRAWN_GROUP
        yield
    finally:
        model.cam_fovy[camera] = own_view
        model.geom_group[:] = groups


def _out_of_sight(
    model: mujoco.MjModel, data: mujoco.MjData, camera: int, aspect: float
) -> Bool[np.ndarray, " geoms"]:
    """Find geoms whose bounding box lies entirely beyond one of the four sides of the view."""
    boxes = model.geom_aabb[:, None, :3] + model.geom_aabb[:, None, 3:] * _BOX_CORNERS
    world = boxes @ data.geom_xmat.reshape(-1, 3, 3).swapaxes(1, 2) + data.geom_xpos[:, None]
    seen = (world - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)
    x, y, z = np.moveaxis(seen, -1, 0)
    up = np.tan(np.radians(model.cam_fovy[camera]) / 2)
    right = up * aspect
    # The camera looks along −z.
    outside = [x > -z * right, -x > -z * right, y > -z * up, -y > -z * up]
    boundless = model.geom_rbound == 0  # planes
    return np.any([side.all(axis=1) for side in outside], axis=0) & ~boundless

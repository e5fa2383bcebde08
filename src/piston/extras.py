"""Packages that are not installed: which extra of Piston brings one, and how to install it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# The packages that each extra adds, by the names under which they are imported.
_PACKAGES = {
    "sim": ("mujoco", "dm_control", "gymnasium", "gym_aloha", "metaworld"),
    "track": ("wandb", "tensorboard"),
    "jax-weights": ("tensorstore",),
    "hdf5": ("h5py",),
    "gs": ("gcsfs",),
    "view": ("starlette", "uvicorn"),
    # Piston's own dependencies: without one of them the installation is incomplete.
    "": (
        *("PIL", "av", "filelock", "fsspec", "huggingface_hub", "jaxtyping", "jinja2", "msgpack"),
        *("numpy", "piston_client", "pyarrow", "rich", "safetensors", "sentencepiece"),
        *("tokenizers", "torch", "tyro", "websockets"),
    ),
}
_EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages}

# What an extra does not bring from a version of Python on: why, and what pip can install instead.
_NO_LABMAZE = "its dependency labmaze has no wheel"
_DM_CONTROL = "1.0.28" if sys.version_info < (3, 14) else "1.0.40"  # for the extra's mujoco
_GAPS = {
    "gym_aloha": ((3, 13), _NO_LABMAZE, "gym-aloha==0.1.5"),
    # With what gym-aloha's environments import of its dependencies.
    "dm_control": ((3, 13), _NO_LABMAZE, f"dm-control=={_DM_CONTROL} absl-py dm-env lxml scipy"),
    "metaworld": (
        (3, 14),
        "it declares Python 3.13 or older, but works",
        "--ignore-requires-python metaworld==3.1.1 imageio scipy",
    ),
}


def missing_package(what: str, package: str) -> ImportError:
    """Return the error for `what`, which needs a package that is not installed."""
    python, here = sys.executable, os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118
    pip = f"{shlex.quote(python.removeprefix(here))} -m pip install"
    name = _EXTRAS[package]
    extra = f"'piston[{name}]'" if name else "piston"
    message = f"{what} needs {package}, which is not installed."
    since, reason, packages = _GAPS.get(package, ((4, 0), "", ""))
    if sys.version_info < since:
        return ImportError(f"{message} Run: {pip} {extra}")
    message += f" {extra} does not bring it on this Python: {reason}."
    return ImportError(f"{message} Run: {pip} --no-deps {packages}")


@contextlib.contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Name the package and the command if an import in this block lacks a package of ours.

    Any other module that is missing stays a ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise missing_package(what, package) from error


def require_compiler(what: str) -> None:
    """Raise ImportError if `what`, which uses torch.compile, cannot compile on this machine."""
    if not sys.platform.startswith("linux"):
        return
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler})"]
    if not headers.exists():
        missing.append(f"Python's headers ({headers})")
    if missing:
        raise ImportError(
            f"{what} needs {' and '.join(missing)}. On Debian or Ubuntu: apt install g++ "
            f"python3.{sys.version_info.minor}-dev. On Fedora: dnf install gcc-c++ python3-devel."
        )

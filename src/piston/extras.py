"""Packages that are not installed: which extra of Piston brings one, and how to install it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator

# The packages that each extra adds, by the names under which they are imported.
_PACKAGES = {
    "sim": ("mujoco", "dm_control", "gymnasium", "gym_aloha", "metaworld"),
    "track": ("wandb", "tensorboard"),
    "jax-weights": ("tensorstore",),
    "hdf5": ("h5py",),
    "gs": ("gcsfs",),
    "inspect": ("starlette", "uvicorn"),
    # Piston's own dependencies: without one of them the installation is incomplete.
    "": (
        *("PIL", "av", "filelock", "fsspec", "huggingface_hub", "jaxtyping", "msgpack", "numpy"),
        *("piston_client", "pyarrow", "rich", "safetensors", "sentencepiece", "tokenizers"),
        *("torch", "tyro", "websockets"),
    ),
}
_EXTRAS = {package: extra for extra, packages in _PACKAGES.items() for package in packages}


def missing_package(what: str, package: str) -> ImportError:
    """Return the error for `what`, which needs a package that is not installed."""
    python, here = sys.executable, os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118
    extra = _EXTRAS[package]
    target = f"'piston[{extra}]'" if extra else "piston"
    command = f"{shlex.quote(python.removeprefix(here))} -m pip install {target}"
    return ImportError(f"{what} needs {package}, which is not installed. Run: {command}")


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

"""Checkpoints: reading ours, openpi's (JAX and PyTorch) and LeRobot's; writing ours."""

from piston.weights.checkpoint import (
    Checkpoint,
    MismatchError,
    build_model,
    build_on_meta,
    expected_shapes,
    open_checkpoint,
)
from piston.weights.models import (
    convert,
    load_adapters,
    load_into,
    load_model,
    save_adapters,
    save_model,
)
from piston.weights.tensors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MismatchError",
    "build_model",
    "build_on_meta",
    "convert",
    "expected_shapes",
    "load_adapters",
    "load_into",
    "load_model",
    "open_checkpoint",
    "save_adapters",
    "save_model",
]

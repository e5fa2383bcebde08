"""Checkpoints: reading ours, openpi's and LeRobot's; writing ours, openpi's and LeRobot's."""

from piston.models.build import build_model, build_on_meta
from piston.weights.checkpoint import (
    Checkpoint,
    MismatchError,
    expected_shapes,
    open_checkpoint,
)
from piston.weights.conversion import FORMATS, Format, convert
from piston.weights.lerobot import read_statistics
from piston.weights.models import load_model, save_model
from piston.weights.tensors import CheckpointError

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointError",
    "Format",
    "MismatchError",
    "build_model",
    "build_on_meta",
    "convert",
    "expected_shapes",
    "load_model",
    "open_checkpoint",
    "read_statistics",
    "save_model",
]

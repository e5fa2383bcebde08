"""`piston convert SOURCE TARGET`: a checkpoint of any known format becomes one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from piston import presets, weights
from piston.cli.console import console
from piston.progress import BYTES, ProgressBar

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(args: list[str]) -> int:
    tyro.cli(_convert, args=args, prog="piston convert")
    return 0


def _convert(
    source: Annotated[str, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "bfloat16"] | None = None,
    preset: str | None = None,
) -> None:
    """Write a checkpoint of the JAX trainer, openpi's PyTorch or LeRobot in Piston's format.

    Args:
        source: A folder, a .safetensors file, or a location (gs://, hf://, https://).
        target: The new folder.
        dtype: Hold the large matrices in this; by default as they are stored.
        preset: Check the sizes against this preset; by default they are inferred.
    """
    with ProgressBar("converting", BYTES) as bar:
        checkpoint = weights.convert(
            source,
            target,
            None if dtype is None else _DTYPES[dtype],
            config=None if preset is None else presets.get(preset).model,
            progress=bar.show,
        )
    console().print(
        f"Wrote {target}: {checkpoint.config.family}, {len(checkpoint.names())} tensors, "
        f"{checkpoint.num_bytes / 1e6:,.1f} MB."
    )

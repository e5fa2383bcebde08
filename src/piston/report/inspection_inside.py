"""The section on the inside of one inference: denoising, attention, or the tokens it wrote.

Dims: l layers, r rows and c columns of patches, w words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from piston.inspection.inside import Attention, Inside
from piston.inspection.results import evenly
from piston.report.document import render
from piston.report.figures import percent
from piston.report.prediction import denoising_figure

# Layers that are shown as pictures, evenly spread; the table has all.
_MAX_LAYERS = 6
_MAX_TOKENS = 40
_ORANGE = np.array([253, 140, 30])


def inside_section(result: Inside, names: Sequence[str], cameras: Mapping[str, str]) -> Markup:
    """Return the section; `names` are of the actions, `cameras` the robot's names by slot."""
    denoising = None
    if result.path is not None and result.recorded is not None:
        denoising = denoising_figure(result.path, result.recorded, names)
    found = result.attention
    return render(
        "inside.html",
        result=result,
        denoising=denoising,
        layers=_layers(result, cameras),
        words=[] if found is None else list(zip(found.words, found.of_words.mean(0).tolist())),
        shares={} if found is None else _shares(found, cameras),
        written=result.written,
        num_shown=_MAX_TOKENS,
    )


def _layers(
    result: Inside, cameras: Mapping[str, str]
) -> dict[str, list[tuple[int, UInt8[np.ndarray, "_ _ 3"]]]]:
    """Return the pictures of some layers for each camera, with the attention laid over."""
    found = result.attention
    if found is None:
        return {}
    chosen = evenly(len(found.of_actions), _MAX_LAYERS)
    return {
        cameras.get(slot, slot): [
            (layer, overlay(result.pictures[slot], shares[layer])) for layer in chosen
        ]
        for slot, shares in found.images.items()
    }


def overlay(
    pixels: UInt8[np.ndarray, "y x 3"], shares: Float[np.ndarray, "r c"]
) -> UInt8[np.ndarray, "y x 3"]:
    """Return a grey image with its patches the more orange, the more attention they have."""
    strength = Image.fromarray((255 * shares / max(shares.max(), 1e-12)).astype(np.uint8))
    height, width = pixels.shape[:2]
    mask = np.asarray(strength.resize((width, height), Image.Resampling.NEAREST))[..., None] / 255
    grey = pixels.mean(-1, keepdims=True)
    return ((1 - 0.7 * mask) * grey + 0.7 * mask * _ORANGE).astype(np.uint8)


def _shares(found: Attention, cameras: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return a table of the layers with the share of each kind of token."""
    kinds = {
        cameras.get(slot, slot).replace("_", " "): shares.sum((1, 2))
        for slot, shares in found.images.items()
    }
    kinds["words"] = found.of_words.sum(1)
    if found.of_state is not None:
        kinds["state"] = found.of_state
    kinds["actions themselves"] = found.of_actions
    rows = [
        (f"layer {layer}", *(percent(shares[layer]) for shares in kinds.values()))
        for layer in range(len(found.of_actions))
    ]
    return {"columns": ["", *kinds], "rows": rows}

"""Pictures and videos as data URIs: the page carries them within itself."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

# From minus to plus: blue, pale, orange, told apart by people with any colour vision.
_COLOURS = np.array(
    [[33, 102, 172], [146, 197, 222], [247, 247, 247], [253, 184, 99], [179, 88, 6]]
)


def png(image: UInt8[np.ndarray, "h w 3"], longest: int | None = None) -> str:
    """The picture, made smaller where a side is longer than `longest`."""
    picture = Image.fromarray(image)
    if longest is not None:
        picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return _data_uri("image/png", buffer.getvalue())


def heat_map(values: Float[np.ndarray, "r c"], limit: float) -> UInt8[np.ndarray, "r c 3"]:
    """A pixel per number: −limit blue, 0 pale, +limit orange."""
    places = np.clip(values / limit, -1, 1)
    channels = [np.interp(places, np.linspace(-1, 1, 5), channel) for channel in _COLOURS.T]
    return np.stack(channels, axis=-1).astype(np.uint8)


def mp4(path: Path) -> str:
    return _data_uri("video/mp4", path.read_bytes())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"

from typing import Any, NamedTuple


class Image(NamedTuple):
    topic: str
    pixels: Any

"""The old name of `piston.data.record`."""

import warnings

from piston.data.record.encoding import (
    CameraThread,
    VideoEncoding,
    encode_png,
    encode_video,
    priority_kept,
)
from piston.data.record.recorder import Recorder

__all__ = [
    "CameraThread",
    "Recorder",
    "VideoEncoding",
    "encode_png",
    "encode_video",
    "priority_kept",
]

warnings.warn(
    "piston.data.recorder has moved: import from piston.data.record.", FutureWarning, stacklevel=2
)

"""Joining mp4 files without decoding them.

Knows packets, time stamps and what makes two streams joinable. Knows nothing of episodes or
cameras. Joined frames decode to exactly the pixels of the separate files.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from piston.data.video_encoding import as_fraction
from piston.files import atomic_file

# Codecs that an mp4 holds and that every reader of LeRobot sets can decode.
JOINABLE_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")


@dataclasses.dataclass(frozen=True)
class VideoSummary:
    """What a video file says of itself without decoding a frame."""

    codec: str
    pix_fmt: str
    height: int
    width: int
    has_audio: bool
    times: tuple[Fraction, ...]  # seconds of every frame, ascending

    @property
    def num_frames(self) -> int:
        return len(self.times)

    def follows_fps(self, fps: float, tolerance: float = 1e-4) -> bool:
        """Whether frame i is shown at i / fps seconds."""
        expected = np.arange(self.num_frames) / fps
        return bool(np.all(np.abs(np.array(self.times, dtype=np.float64) - expected) < tolerance))

    def describe(self, fps: float) -> dict[str, Any]:
        """The stream's part of a video feature's info, as LeRobot writes it."""
        return {
            "video.height": self.height,
            "video.width": self.width,
            "video.codec": self.codec,
            "video.pix_fmt": self.pix_fmt,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": self.has_audio,
        }


def summarise_video(path: Path) -> VideoSummary:
    """Reads the container's index; raises ValueError naming the file when it is damaged."""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            time_base = stream.time_base
            packets = [packet for packet in container.demux(stream) if packet.dts is not None]
            if time_base is None or not packets:
                raise ValueError(f"{path} holds no video frames")
            return VideoSummary(
                codec=context.codec.canonical_name,
                pix_fmt=context.pix_fmt or "unknown",
                height=context.height,
                width=context.width,
                has_audio=bool(container.streams.audio),
                times=tuple(sorted(_pts(packet) * time_base for packet in packets)),
            )
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a readable video: {error}") from error


def join_key(path: Path) -> tuple[Any, ...]:
    """Videos with the same key can share a file: it has one decoder configuration and one time
    base.
    """
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        first = next(packet for packet in container.demux(stream))
        return (
            *(context.codec.canonical_name, context.pix_fmt, context.height, context.width),
            *(stream.time_base, context.extradata),
            # How far decoding runs ahead of display (B-frames): a longer lead would overtake the
            # file before.
            _pts(first) - _dts(first),
        )


def join_videos(sources: Sequence[tuple[Path, int]], target: Path, fps: float) -> None:
    """Joinable videos, each with its number of frames, back to back at i / fps seconds."""
    rate = as_fraction(fps)
    with atomic_file(target) as temporary:
        options = {
            "movflags": "faststart"
        }  # the index first: players can start before the whole file is there
        with av.open(str(temporary), "w", format="mp4", options=options) as output:
            stream = None
            num_frames = 0
            for source, frames in sources:
                with av.open(str(source)) as container:
                    template = container.streams.video[0]
                    if stream is None:
                        stream = output.add_stream_from_template(template, opaque=True)
                        stream.time_base = template.time_base
                    _append(container, output, stream, num_frames / rate)
                num_frames += frames


def _append(
    container: av.container.InputContainer,
    output: av.container.OutputContainer,
    stream: Any,
    start: Fraction,
) -> None:
    source = container.streams.video[0]
    time_base = source.time_base
    if time_base is None:
        raise ValueError(f"{container.name} has no time base")
    offset = round(start / time_base)
    for packet in container.demux(source):
        if packet.dts is None:  # the end of the stream
            continue
        packet.pts, packet.dts = _pts(packet) + offset, _dts(packet) + offset
        packet.stream = stream
        output.mux(packet)


def _pts(packet: av.Packet) -> int:
    if packet.pts is None:
        raise ValueError("a video packet has no time")
    return packet.pts


def _dts(packet: av.Packet) -> int:
    return packet.dts if packet.dts is not None else _pts(packet)

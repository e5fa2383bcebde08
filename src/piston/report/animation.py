"""One small animation of an evaluation's videos side by side, for pages that play no videos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from piston.sim.scores import Evaluation

# Of one video, in the animation.
_WIDTH, _HEIGHT = 240, 180
_ONE_ROW, _COLUMNS = 4, 3
_BORDER, _STRIP = 3, 24
# Every so-many-th frame is shown, at the videos' own frame rate: as many times faster.
_SPEED = 2
_SECONDS_AT_THE_END = 1.5
Colour = tuple[int, int, int]
_SUCCESS: Colour = (46, 139, 87)
_FAILURE: Colour = (200, 60, 50)
_NEUTRAL: Colour = (130, 130, 130)
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
MAX_BYTES = 1_000_000
_QUALITIES = (70, 50, 35, 20, 10)


def write_animation(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Every video once, framed in green where the task was fulfilled, in red where it was not, in
    grey where the opposite was asked for; at most a million bytes of WebP.
    """
    videos = [(result, video) for result in evaluations for video in result.videos]
    if path.suffix != ".webp":
        raise ValueError(f"The animation is WebP: name it …webp, not {path.name}.")
    if not videos:
        raise ValueError("There are no videos to animate. Run: piston eval … --video")
    path.parent.mkdir(parents=True, exist_ok=True)
    films = [(_frames(video), _colour(result, video)) for result, video in videos]
    fps = _frame_rate(videos[0][1])
    title = f"{'   '.join(map(_told, evaluations))}   {_SPEED} times as fast"
    length = max(len(frames) for frames, _ in films)
    pages = [_page(films, index, title) for index in range(length)]
    durations = [round(1000 / fps)] * (len(pages) - 1) + [round(1000 * _SECONDS_AT_THE_END)]
    for quality in _QUALITIES:
        pages[0].save(
            path,
            "WEBP",
            save_all=True,
            append_images=pages[1:],
            duration=durations,
            loop=0,
            quality=quality,
            method=4,
        )
        if path.stat().st_size <= MAX_BYTES:
            return
    raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}.")


def _frames(video: Path) -> list[Image.Image]:
    with av.open(str(video)) as container:
        chosen = itertools.islice(container.decode(video=0), 0, None, _SPEED)
        return [frame.to_image().resize((_WIDTH, _HEIGHT)) for frame in chosen]


def _frame_rate(video: Path) -> float:
    with av.open(str(video)) as container:
        return float(container.streams.video[0].average_rate or 10)


def _colour(result: Evaluation, video: Path) -> Colour:
    if result.opposite:
        return _NEUTRAL
    return _SUCCESS if result.outcome_of(video).success else _FAILURE


def _told(result: Evaluation) -> str:
    if result.opposite:
        return f"asked for the opposite (grey): {result.success}"
    return f"{result.task}: {result.success}"


def _page(films: list[tuple[list[Image.Image], Colour]], index: int, title: str) -> Image.Image:
    """All videos at one moment; one that is over shows its last frame."""
    columns = len(films) if len(films) <= _ONE_ROW else _COLUMNS
    rows = -(-len(films) // columns)
    page = Image.new("RGB", (columns * _WIDTH, rows * _HEIGHT + _STRIP), _PAPER)
    for place, (frames, colour) in enumerate(films):
        row, column = divmod(place, columns)
        tile = np.array(frames[min(index, len(frames) - 1)])
        tile[:_BORDER] = tile[-_BORDER:] = colour
        tile[:, :_BORDER] = tile[:, -_BORDER:] = colour
        page.paste(Image.fromarray(tile), (column * _WIDTH, row * _HEIGHT))
    ImageDraw.Draw(page).text((6, rows * _HEIGHT + 6), title, fill=_INK)
    return page

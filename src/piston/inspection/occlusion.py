"""Where a policy looks: parts of a picture are covered, and the change of its actions measured.

Coarse to fine: a grid of cells first, then the strongest cells are divided into four, again and
again, until the inferences that are allowed are used up. Half a cell around a cell is covered too.

    ┌───────┬───┬───┐   The parts of a cell share out what the cell has: their mean is its value,
    │       │ 1 │ 3 │   and their ratios are those of their own effects. So large and small cells
    │   2   ├───┼───┤   can be compared, although a small one covers less.
    │       │ 0 │ 4 │
    └───────┴───┴───┘

A part is covered with what the camera usually shows there: the median of pictures from the whole
data set. One colour finds the cube of the demo as often, a blurred picture less often
(benchmarks/occlusion.py compares them).

Dims: c cells, n noise seeds, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from piston.data.record.encoding import VideoEncoding, encode_video
from piston.inspection.frames import Frame, Frames
from piston.inspection.influence import in_one_number
from piston.inspection.probe import Box, Intervention, Probe
from piston.progress import Progress, no_progress

Picture = UInt8[np.ndarray, "_ _ 3"]

# Cells of the first grid along each side, and the smallest cell's share of it: 3 of 96 pixels.
_GRID, _SMALLEST = 8, 1 / 32
# Cells that are divided at once, so that their parts are one batch.
_AT_ONCE = 4
# Pictures of the data set whose median is the background.
_PICTURES = 25
# Of films: the smallest side in pixels, and the colour of what has the largest effect.
_FILM_PIXELS, _COLOR, _OPACITY = 384, (255, 225, 0), 0.75


@dataclasses.dataclass(frozen=True)
class OcclusionMap:
    """The effect of each part of a camera's picture on the chosen actions."""

    camera: str
    # The actions and the steps of the chunk, from the first up to the last, that were compared.
    actions: tuple[str, ...]
    steps: tuple[int, int]
    # Cells that do not overlap and fill the picture.
    cells: tuple[Box, ...]
    # What covering a cell alone changes, in standard deviations of the recorded actions.
    effect: Float[np.ndarray, " c"]
    # The same shared out between the parts of a cell, so that cells of all sizes can be compared.
    value: Float[np.ndarray, " c"]
    num_inferences: int

    @property
    def strongest(self) -> Box:
        return self.cells[int(np.argmax(self.value))]

    def pixels(self, height: int, width: int) -> Float[np.ndarray, "height width"]:
        """Return the value of every pixel of a picture of this size."""
        values = np.zeros((height, width))
        for cell, value in zip(self.cells, self.value, strict=True):
            values[cell.pixels(height, width)] = value
        return values


class _Cell(NamedTuple):
    box: Box
    effect: float
    value: float


class Occlusion:
    """Makes maps for some actions (None: all) and steps of the chunk (None: all).

    `budget` is how many versions of a picture may be asked for; each has as many inferences as the
    probe has seeds. A few seeds are enough for a map: the noise is the same for all versions.
    """

    def __init__(
        self,
        probe: Probe,
        frames: Frames,
        *,
        actions: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        budget: int = 160,
    ) -> None:
        names = frames.action_names
        if unknown := set(actions or ()) - set(names):
            raise LookupError(f"There is no action {min(unknown)!r}; there is {', '.join(names)}.")
        horizon = probe.policy.data.steps_read(probe.policy.model.config.action_horizon)
        begin, end = steps or (0, horizon)
        if not 0 <= begin < end <= horizon:
            raise ValueError(f"The steps are {(begin, end)}; a chunk has {horizon}.")
        if budget <= _GRID**2:
            raise ValueError(f"The budget is {budget}; the first grid alone needs {_GRID**2 + 1}.")
        self._probe, self._frames, self._budget = probe, frames, budget
        self._actions = tuple(names if actions is None else actions)
        self._dims = [names.index(name) for name in self._actions]
        self._scale, self._steps = frames.action_scale()[self._dims], (begin, end)
        self._backgrounds: dict[str, Picture] = {}

    def map(
        self,
        frame: Frame | Mapping[str, Any],
        camera: str,
        cover: Picture | None = None,
        progress: Progress = no_progress,
    ) -> OcclusionMap:
        """Return the map of a frame. Covered parts show `cover`, by default the background."""
        seen = self.picture(frame, camera)
        hidden = self.background(camera) if cover is None else cover
        unchanged = self._probe.chunks(frame, [Intervention()])[0]
        asked = 1

        def effects(boxes: Sequence[Box]) -> list[float]:
            nonlocal asked
            covered = [_covered(seen, hidden, _around(box)) for box in boxes]
            versions = [Intervention(shown={camera: picture}) for picture in covered]
            changes = self._probe.chunks(frame, versions) - unchanged
            asked += len(boxes)
            progress(asked, self._budget)
            return [in_one_number(self._chosen(change), self._scale) for change in changes]

        boxes = _grid(Box(camera, 0, 0, 1, 1), _GRID)
        cells = [_Cell(box, effect, effect) for box, effect in zip(boxes, effects(boxes))]
        smallest = max(_SMALLEST, 1 / min(seen.shape[:2]))
        while chosen := _largest(cells, smallest, min(_AT_ONCE, (self._budget - asked) // 4)):
            parts = [_grid(cell.box, 2) for cell in chosen]
            found = np.reshape(effects(list(itertools.chain(*parts))), (-1, 4))
            cells = [cell for cell in cells if cell not in chosen]
            for cell, boxes, own in zip(chosen, parts, found, strict=True):
                shares = own / own.mean() if own.any() else np.zeros(4)
                values = (cell.value * shares).tolist()
                cells += map(_Cell, boxes, own.tolist(), values)
        return OcclusionMap(
            camera=camera,
            actions=self._actions,
            steps=self._steps,
            cells=tuple(cell.box for cell in cells),
            effect=np.array([cell.effect for cell in cells]),
            value=np.array([cell.value for cell in cells]),
            num_inferences=asked * len(unchanged),
        )

    def background(self, camera: str) -> Picture:
        """Return the median of pictures from the whole data set, as the model sees them."""
        if camera not in self._backgrounds:
            places = self._frames.spread_out(_PICTURES)
            shown = [self._probe.pictures(self._frames[place]) for place in places]
            pictures = [one[camera] for one in shown if camera in one]
            if not pictures:
                raise LookupError(f"There is no camera {camera!r}; there is {', '.join(shown[0])}.")
            self._backgrounds[camera] = np.median(pictures, axis=0).round().astype(np.uint8)
        return self._backgrounds[camera]

    def film(
        self,
        episode: int,
        camera: str,
        path: Path,
        *,
        stride: int = 10,
        progress: Progress = no_progress,
    ) -> list[OcclusionMap]:
        """Write the maps of an episode over its pictures, as an MP4 at the episode's pace.

        Every `stride`-th frame has a map. The brightest colour is the largest value of the episode.
        """
        numbers = range(0, self._frames.episodes[episode], stride)
        frames, maps = [], []
        for done, number in enumerate(numbers):
            frame = self._frames[episode, number]
            maps.append(self.map(frame, camera))
            frames.append(self.picture(frame, camera))
            progress(done + 1, len(numbers))
        largest = max(float(one.value.max()) for one in maps)
        pictures = (overlay_map(frame, one, largest) for frame, one in zip(frames, maps))
        encode_video(pictures, path, self._frames.fps / stride, VideoEncoding.choose("h264"))
        return maps

    def picture(self, frame: Frame | Mapping[str, Any], camera: str) -> Picture:
        """Return what the model sees of a camera. Raises LookupError if the camera is absent."""
        pictures = self._probe.pictures(frame)
        if camera not in pictures:
            raise LookupError(f"There is no camera {camera!r}; there is {', '.join(pictures)}.")
        return pictures[camera]

    def _chosen(self, change: Float[np.ndarray, "n h a"]) -> Float[np.ndarray, "n _ _"]:
        return change[:, slice(*self._steps), self._dims]


def overlay_map(picture: Picture, found: OcclusionMap, largest: float | None = None) -> Picture:
    """Return the picture, enlarged, with the map laid over; `largest` has the full colour.

    The colour grows with the square root of a value, so that weak parts are seen as well.
    """
    largest = float(found.value.max()) if largest is None else largest
    height, width = picture.shape[:2]
    times = -(-_FILM_PIXELS // min(height, width))
    size = (times * width, times * height)
    enlarged = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
    values = found.pixels(size[1], size[0])[..., None] / (largest or 1.0)
    opacity = _OPACITY * np.sqrt(np.clip(values, 0, 1))
    mixed: Picture = (enlarged * (1 - opacity) + opacity * np.array(_COLOR)).round().astype("u1")
    return mixed


def _grid(box: Box, count: int) -> list[Box]:
    """Divide a box into `count` rows of as many cells."""
    columns = list(itertools.pairwise(np.linspace(box.left, box.right, count + 1).tolist()))
    rows = itertools.pairwise(np.linspace(box.top, box.bottom, count + 1).tolist())
    return [
        Box(box.camera, left, top, right, bottom)
        for (top, bottom), (left, right) in itertools.product(rows, columns)
    ]


def _around(cell: Box) -> Box:
    """Return a box of twice the side, so that an object between two cells is covered by one."""
    x, y = (cell.right - cell.left) / 2, (cell.bottom - cell.top) / 2
    sides = np.clip([cell.left - x, cell.top - y, cell.right + x, cell.bottom + y], 0, 1)
    return Box(cell.camera, *sides.tolist())


def _covered(picture: Picture, cover: Picture, box: Box) -> Picture:
    changed, part = picture.copy(), box.pixels(*picture.shape[:2])
    changed[part] = cover[part]
    return changed


def _largest(cells: Sequence[_Cell], smallest: float, count: int) -> list[_Cell]:
    """Return the cells of the largest values that have any effect and can be divided."""
    widths = ((cell, cell.box.right - cell.box.left) for cell in cells)
    divisible = [cell for cell, width in widths if cell.value > 0 and width >= 2 * smallest]
    return sorted(divisible, key=lambda cell: -cell.value)[:count]

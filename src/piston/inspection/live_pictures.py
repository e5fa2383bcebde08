"""The pictures of a live set against those of training, as the model sees them.

Pictures are compared at a small size: a live picture with the one of training that is nearest to
it. Each explanation of a difference, such as red and blue swapped, is undone in the live pictures;
the true one brings them near to those of training.

Dims: n pictures, s side of a small picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image

from piston.inference.policy import Policy
from piston.inspection.frames import Frames, camera_paths
from piston.inspection.results import NOT_IN_JSON
from piston.progress import Progress
from piston.transforms import Data, flatten_dict

AS_IT_IS, BRIGHTNESS = "as it is", "brightness"
_SIDE = 32
# A live picture is a part of what training shows, or the other way round.
_ZOOMS = (1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2.0)
_QUANTILES = 1000
# A factor that augmentation usually covers; and standard deviations of the mean of an episode.
_BRIGHTNESS, _BRIGHTNESS_EPISODES = 1.25, 5.0
# A black picture has this brightness: a factor has to be finite.
_DARKEST = 0.01

Pictures = UInt8[np.ndarray, "n h w 3"]
Small = Float[np.ndarray, "n s s 3"]


@dataclasses.dataclass(frozen=True)
class Camera:
    """One camera; distances are root mean squares of differences of small pictures, 0 to 255."""

    # The robot's name and the model's.
    name: str
    slot: str
    # Height and width as sent; None if the live set does not have this camera.
    training_size: tuple[int, int]
    live_size: tuple[int, int] | None
    # The median distance of a training picture to the nearest one of another episode; None if there
    # is one episode only.
    own_distance: float | None
    # The same of the live pictures to those of training, by what is undone in them.
    distances: Mapping[str, float]
    # The distance between the distributions of red less blue, in levels, as it is and with red and
    # blue swapped: it does not depend on what is where in the picture.
    colour_distance: float
    swapped_colour_distance: float
    # The live mean brightness and contrast divided by those of training. They count from a factor
    # of `brightness_limit` on, as episodes of training differ among themselves.
    brightness: float
    brightness_limit: float
    contrast: float
    # In which share of the moments with motion the picture stands still; None if not known.
    still: float | None
    # By how many seconds the picture is late; the share of the error in the state that is estimated
    # from the picture that remains if this is undone.
    delay: float | None
    delay_error: float | None
    # As the model sees them; the live one and the training picture nearest to it.
    live_picture: UInt8[np.ndarray, "h w 3"] | None = dataclasses.field(metadata=NOT_IN_JSON)
    training_picture: UInt8[np.ndarray, "h w 3"] = dataclasses.field(metadata=NOT_IN_JSON)

    @property
    def explanation(self) -> str:
        """What has to be undone for the smallest distance."""
        return min(self.distances, key=lambda name: self.distances[name], default=AS_IT_IS)

    @property
    def light(self) -> float:
        """The factor of the brightness, up or down, or of the contrast if that explains more."""
        factors = [self.brightness]
        if self.explanation == BRIGHTNESS:
            factors.append(self.contrast)
        factors = [max(one, _DARKEST) for one in factors]
        return max(max(one, 1 / one) for one in factors)


class Sample:
    """Pictures of some frames of a set, by the model's slots."""

    def __init__(self, policy: Policy, frames: Frames, count: int, progress: Progress) -> None:
        places = _moments(frames, count)
        starts = dict(zip(frames.episodes, frames.source.episode_bounds[:, 0].tolist()))
        self.episodes = np.array([episode for episode, _ in places])
        # Where they are in the set's columns.
        self.rows = np.array([starts[episode] + number for episode, number in places])
        self.sizes: dict[str, tuple[int, int]] = {}
        seen: dict[str, list[np.ndarray]] = {}
        for done, place in enumerate(places, start=1):
            observation = frames[place].observation
            images = _images(policy, observation)
            self.sizes |= {slot: _size(image) for slot, image in images.items()}
            if images:
                whole = _with_all_cameras(policy.metadata["observation"], observation)
                inputs = policy.prepare(whole).inputs
                for slot in images:
                    seen.setdefault(slot, []).append(np.asarray(inputs["image"][slot]))
            progress(done, len(places))
        self.pictures: dict[str, Pictures] = {slot: np.stack(one) for slot, one in seen.items()}
        self._small: dict[tuple[str, float], Small] = {}

    def small(self, slot: str, share: float = 1.0) -> Small:
        """Return the middle of the pictures, of which `share` of each side is kept."""
        if (slot, share) not in self._small:
            self._small[slot, share] = _shrink(self.pictures[slot], share)
        return self._small[slot, share]


def compare_cameras(names: Mapping[str, str], training: Sample, live: Sample) -> list[Camera]:
    found = []
    for slot, ours in training.pictures.items():
        small = training.small(slot)
        same = training.episodes[:, None] == training.episodes
        camera = Camera(
            name=names.get(slot, slot),
            slot=slot,
            training_size=training.sizes[slot],
            live_size=live.sizes.get(slot),
            own_distance=None if same.all() else _nearest(small, small, same)[0],
            distances={},
            colour_distance=0.0,
            swapped_colour_distance=0.0,
            brightness=1.0,
            brightness_limit=_brightness_limit(small, training.episodes),
            contrast=1.0,
            still=None,
            delay=None,
            delay_error=None,
            live_picture=None,
            training_picture=ours[len(ours) // 2],
        )
        found.append(_with_live(camera, names, training, live) if slot in live.pictures else camera)
    return found


def _with_live(camera: Camera, names: Mapping[str, str], training: Sample, live: Sample) -> Camera:
    ours, theirs = training.small(camera.slot), live.small(camera.slot)
    undone = _undone(camera.slot, names, training, live)
    distances = {name: _nearest(pictures, known)[0] for name, pictures, known in undone}
    colour, live_colour = _red_less_blue(ours), _red_less_blue(theirs)
    _, nearest = _nearest(theirs, ours)
    middle = len(theirs) // 2
    return dataclasses.replace(
        camera,
        distances=distances,
        colour_distance=_apart(colour, live_colour),
        swapped_colour_distance=_apart(colour, -live_colour),
        brightness=float(theirs.mean() / max(ours.mean(), 1.0)),
        contrast=float(theirs.std() / max(ours.std(), 1.0)),
        live_picture=live.pictures[camera.slot][middle],
        training_picture=training.pictures[camera.slot][nearest[middle]],
    )


def _undone(
    slot: str, names: Mapping[str, str], training: Sample, live: Sample
) -> Iterator[tuple[str, Small, Small]]:
    """Yield what may be wrong, the live pictures with it undone, and what they should be like."""
    ours, theirs = training.small(slot), live.small(slot)
    yield AS_IT_IS, theirs, ours
    yield "red and blue swapped", theirs[..., ::-1], ours
    yield "mirrored", theirs[:, :, ::-1], ours
    yield "upside down", theirs[:, ::-1], ours
    yield "turned by 180°", theirs[:, ::-1, ::-1], ours
    yield "turned to the left", np.rot90(theirs, -1, (1, 2)), ours
    yield "turned to the right", np.rot90(theirs, 1, (1, 2)), ours
    scale = ours.std() / max(theirs.std(), 1.0)
    yield BRIGHTNESS, (theirs - theirs.mean()) * scale + ours.mean(), ours
    for zoom in _ZOOMS:
        yield f"zoomed in by {zoom:g}", theirs, training.small(slot, 1 / zoom)
        yield f"zoomed out by {zoom:g}", live.small(slot, 1 / zoom), ours
    for other in training.pictures:
        if other != slot:
            yield f"camera {names.get(other, other)}", theirs, training.small(other)


def _shrink(pictures: Pictures, share: float) -> Small:
    height, width = pictures.shape[1:3]
    top, left = height * (1 - share) / 2, width * (1 - share) / 2
    box = (left, top, width - left, height - top)
    small = [
        Image.fromarray(picture).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box=box)
        for picture in pictures
    ]
    return np.stack([np.asarray(one, np.float32) for one in small])


def _nearest(
    pictures: Small, known: Small, excluded: Bool[np.ndarray, "n m"] | None = None
) -> tuple[float, Int[np.ndarray, " n"]]:
    """Return the median distance to the nearest known picture, and which one that is."""
    ours, theirs = pictures.reshape(len(pictures), -1), known.reshape(len(known), -1)
    squares = (ours**2).sum(1)[:, None] + (theirs**2).sum(1) - 2 * ours @ theirs.T
    distances = np.sqrt(np.maximum(squares, 0) / ours.shape[1])
    if excluded is not None:
        distances[excluded] = np.inf
    return float(np.median(distances.min(1))), distances.argmin(1)


def _red_less_blue(pictures: Small) -> Float[np.ndarray, " pixels"]:
    return (pictures[..., 0] - pictures[..., 2]).reshape(-1)


def _apart(first: Float[np.ndarray, " m"], second: Float[np.ndarray, " n"]) -> float:
    """Return the mean distance of two distributions: between their quantiles."""
    shares = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return float(np.abs(np.quantile(first, shares) - np.quantile(second, shares)).mean())


def _brightness_limit(pictures: Small, episodes: Int[np.ndarray, " n"]) -> float:
    means = [pictures[episodes == one].mean() for one in np.unique(episodes)]
    spread = float(np.std(np.log(np.maximum(means, 1.0))))
    return max(_BRIGHTNESS, float(np.exp(_BRIGHTNESS_EPISODES * spread)))


def _moments(frames: Frames, count: int) -> list[tuple[int, int]]:
    """Return about `count` places: from episodes that are spread over the set, evenly in each."""
    lengths = frames.episodes
    each = max(8, -(-count // len(lengths)))
    chosen = np.linspace(0, len(lengths) - 1, min(len(lengths), -(-count // each))).round()
    places = set()
    for number, episode in enumerate([*lengths][int(i)] for i in chosen):
        # The golden ratio lets the episodes' moments fall between one another.
        shares = (np.arange(each) + (0.5 + number * 0.6180339887) % 1) / each
        places |= {(episode, int(share * lengths[episode])) for share in shares}
    return sorted(places)


def _images(policy: Policy, observation: Data) -> dict[str, Any]:
    """Return the images of an observation as they were sent, by slot."""
    flat = flatten_dict(observation)
    return {slot: flat[path] for slot, path in camera_paths(policy).items() if path in flat}


def _with_all_cameras(described: Mapping[str, Any], observation: Mapping[str, Any]) -> Data:
    """Return an observation with black images for the cameras that it does not have."""
    whole = dict(observation)
    for name, about in described.items():
        if "dtype" not in about:
            whole[name] = _with_all_cameras(about, whole.get(name, {}))
        elif "slot" in about:
            whole.setdefault(name, np.zeros((8, 8, 3), np.uint8))
    return whole


def _size(image: Any) -> tuple[int, int]:
    height, width = np.shape(image)[:2]
    return height, width

"""The images of a live set against those of training, as the model sees them.

Images are compared at a small size: a live image with the one of training that is nearest to it.
Each hypothesis about a difference, such as red and blue swapped, is undone in the live images; the
true one brings them near to those of training.

Dims: n images, s side of a small image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image

from piston.inference.policy import Policy
from piston.inspection.frames import Frames, camera_names, camera_paths
from piston.inspection.live_numbers import Numbers
from piston.inspection.results import NOT_IN_JSON, evenly
from piston.progress import Progress, no_progress
from piston.transforms import Data, flatten_dict

_SIDE = 32
# A live image is a part of what training shows, or the other way round. Undoing the nearest of
# these factors is enough to recognise all from 1.2 to 2, measured on the images of the tests.
_ZOOMS = (1.2, 1.5, 1.9)
_QUANTILES = 1000
# A factor that augmentation usually covers; and standard deviations of the mean of an episode.
BRIGHTNESS, _BRIGHTNESS_EPISODES = 1.25, 5.0
# A black image has this brightness: a factor has to be finite.
_DARKEST = 0.01
# Images of training that are equal, as those of a covered camera, count as so many levels apart.
_LEAST_DISTANCE = 1.0
# Sizes that are rounded differently are equal; a stretched image is not.
ASPECT = 0.02
# Distributions of colours that differ by fewer levels of 256 do not tell red from blue.
COLOUR_LEVELS = 0.1

Pictures = UInt8[np.ndarray, "n h w 3"]
Small = Float[np.ndarray, "n s s 3"]


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A change that live images may have; undoing the true one makes them those of training."""

    name: str
    # Of the verdict, and what is said of the camera then; none where nothing is wrong.
    kind: str = ""
    text: str = ""


AS_IT_IS = "as it is"
NOTHING, LIGHT = Hypothesis(AS_IT_IS), Hypothesis("brightness")


@dataclasses.dataclass(frozen=True)
class Camera:
    """One camera; distances are root mean squares of differences of small images, 0 to 255."""

    # The robot's name and the model's.
    name: str
    slot: str
    # Height and width as sent; None if the live set does not have this camera.
    training_size: tuple[int, int]
    live_size: tuple[int, int] | None
    # The median distance of a training image to the nearest one of another episode; None if there
    # is one episode only.
    own_distance: float | None
    # Brightness and contrast count from this factor on, as episodes of training differ.
    brightness_limit: float
    # As the model sees it: the training image nearest to the live one.
    training_picture: UInt8[np.ndarray, "h w 3"] = dataclasses.field(metadata=NOT_IN_JSON)
    # As `own_distance`, of the live images to those of training, by what is undone in them.
    distances: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The cause whose undoing makes the smallest distance.
    cause: Hypothesis = dataclasses.field(default=NOTHING, metadata=NOT_IN_JSON)
    # The distance between the distributions of red less blue, in levels, as it is and with red and
    # blue swapped: it does not depend on what is where in the image.
    colour_distance: float = 0.0
    swapped_colour_distance: float = 0.0
    # The live mean brightness and contrast divided by those of training.
    brightness: float = 1.0
    contrast: float = 1.0
    # In which share of the moments with motion the image stands still; None if not known.
    still: float | None = None
    # By how many seconds the image is late; the share of the error in the state that is estimated
    # from the image that remains if this is undone.
    delay: float | None = None
    delay_error: float | None = None
    live_picture: UInt8[np.ndarray, "h w 3"] | None = dataclasses.field(
        default=None, metadata=NOT_IN_JSON
    )

    @property
    def aspect_factor(self) -> float | None:
        """Width over height, live and in training, the larger divided by the smaller."""
        if self.live_size is None:
            return None
        ours, theirs = (width / height for height, width in (self.training_size, self.live_size))
        return max(theirs / ours, ours / theirs)

    @property
    def size_factor(self) -> float | None:
        """The live height, or else width, divided by that of training, where only these differ."""
        if self.live_size is None or (self.aspect_factor or 0.0) > 1 + ASPECT:
            return None
        factors = [ours / theirs for ours, theirs in zip(self.live_size, self.training_size)]
        return next((factor for factor in factors if factor != 1), None)

    @property
    def sizes(self) -> str:
        """Both sizes, for a sentence."""
        height, width = self.live_size or (0, 0)
        training_height, training_width = self.training_size
        return f"{width} × {height} pixels, in training {training_width} × {training_height}"

    @property
    def light(self) -> float:
        """The factor of the brightness, up or down, or of the contrast if that explains more."""
        factors = [self.brightness]
        if self.cause == LIGHT:
            factors.append(self.contrast)
        factors = [max(factor, _DARKEST) for factor in factors]
        return max(max(factor, 1 / factor) for factor in factors)

    def times_usual(self, cause: Hypothesis) -> float:
        """Return the distance without a cause in those between episodes of training, else 0."""
        if self.own_distance is None:
            return 0.0
        return self.distances[cause.name] / max(self.own_distance, _LEAST_DISTANCE)

    @property
    def left_of_distance(self) -> float:
        """The distance with the cause undone, as a share of what it is."""
        return self.distances[self.cause.name] / max(self.distances[AS_IT_IS], 1e-9)

    @property
    def shows_colour(self) -> bool:
        difference = self.colour_distance - self.swapped_colour_distance
        return abs(difference) >= COLOUR_LEVELS

    @property
    def left_of_colours(self) -> float | None:
        """The distance of colours with red and blue swapped, as a share of what it is."""
        if not self.shows_colour or not self.colour_distance:
            return None
        return self.swapped_colour_distance / self.colour_distance


class ComparedSet(Numbers):
    """What is compared of one set: all its numbers, and images of some frames by slot."""

    def __init__(
        self, policy: Policy, frames: Frames, num_images: int, progress: Progress = no_progress
    ) -> None:
        super().__init__(policy, frames)
        self.cameras = camera_names(policy)
        places = _moments(frames, num_images)
        starts = dict(zip(frames.episodes, frames.source.episode_bounds[:, 0].tolist()))
        self.episodes = np.array([episode for episode, _ in places])
        # Where the images are in the set's columns.
        self.rows = np.array([starts[episode] + number for episode, number in places])
        self.sizes: dict[str, tuple[int, int]] = {}
        seen: dict[str, list[np.ndarray]] = {}
        for done, place in enumerate(places, start=1):
            observation = frames[place].observation
            images = _images(policy, observation)
            for slot, image in images.items():
                height, width = np.shape(image)[:2]
                self.sizes[slot] = height, width
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


def compare_camera(slot: str, training: ComparedSet, live: ComparedSet) -> Camera:
    """Return what the images alone say."""
    ours = training.small(slot)
    same = training.episodes[:, None] == training.episodes
    camera = Camera(
        name=training.cameras.get(slot, slot),
        slot=slot,
        training_size=training.sizes[slot],
        live_size=live.sizes.get(slot),
        own_distance=None if same.all() else _nearest(ours, ours, same)[0],
        brightness_limit=_brightness_limit(ours, training.episodes),
        training_picture=training.pictures[slot][len(ours) // 2],
    )
    if slot not in live.pictures:
        return camera
    theirs = live.small(slot)
    distances = {
        cause: _nearest(images, known)[0] for cause, images, known in _undone(slot, training, live)
    }
    colour, live_colour = _red_less_blue(ours), _red_less_blue(theirs)
    middle = len(theirs) // 2
    nearest = _nearest(theirs, ours)[1][middle]
    return dataclasses.replace(
        camera,
        distances={cause.name: distance for cause, distance in distances.items()},
        cause=min(distances, key=lambda cause: distances[cause]),
        colour_distance=_apart(colour, live_colour),
        swapped_colour_distance=_apart(colour, -live_colour),
        brightness=float(theirs.mean() / max(ours.mean(), 1.0)),
        contrast=float(theirs.std() / max(ours.std(), 1.0)),
        live_picture=live.pictures[slot][middle],
        training_picture=training.pictures[slot][nearest],
    )


def _turned(name: str) -> Hypothesis:
    return Hypothesis(name, "camera-turned", f"is {name}")


def _zoomed(way: str, factor: float) -> Hypothesis:
    text = f"is zoomed {way} by about {factor:g}"
    return Hypothesis(f"zoomed {way} by {factor:g}", "camera-zoomed", text)


# What may be wrong with the pixels, and how it is undone.
_SWAPPED = Hypothesis("red and blue swapped", "red-blue-swapped", "has red and blue swapped")
_PIXELS: tuple[tuple[Hypothesis, Callable[[Small], Small]], ...] = (
    (NOTHING, lambda images: images),
    (_SWAPPED, lambda images: images[..., ::-1]),
    (_turned("mirrored"), lambda images: images[:, :, ::-1]),
    (_turned("upside down"), lambda images: images[:, ::-1]),
    (_turned("turned by 180°"), lambda images: images[:, ::-1, ::-1]),
    (_turned("turned to the left"), lambda images: np.rot90(images, -1, (1, 2))),
    (_turned("turned to the right"), lambda images: np.rot90(images, 1, (1, 2))),
)


def _undone(
    slot: str, training: ComparedSet, live: ComparedSet
) -> Iterator[tuple[Hypothesis, Small, Small]]:
    """Yield what may be wrong, the live images with it undone, and what they should be like."""
    ours, theirs = training.small(slot), live.small(slot)
    for cause, undo in _PIXELS:
        yield cause, undo(theirs), ours
    scale = ours.std() / max(theirs.std(), 1.0)
    yield LIGHT, (theirs - theirs.mean()) * scale + ours.mean(), ours
    for zoom in _ZOOMS:
        yield _zoomed("in", zoom), theirs, training.small(slot, 1 / zoom)
        yield _zoomed("out", zoom), live.small(slot, 1 / zoom), ours
    for other in training.pictures:
        if other != slot:
            name = f"camera {training.cameras.get(other, other)}"
            text = f"shows what {name} showed in training"
            yield Hypothesis(name, "cameras-swapped", text), theirs, training.small(other)


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
    return max(BRIGHTNESS, float(np.exp(_BRIGHTNESS_EPISODES * spread)))


def _moments(frames: Frames, count: int) -> list[tuple[int, int]]:
    """Return about `count` places: from episodes that are spread over the set, evenly in each."""
    lengths = frames.episodes
    each = max(8, -(-count // len(lengths)))
    chosen = evenly(len(lengths), -(-count // each))
    places = set()
    for number, episode in enumerate([*lengths][i] for i in chosen):
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

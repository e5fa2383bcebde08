"""Ask a policy many versions of one observation, in batches and with the same noise for all.

An intervention changes the observation as the robot sends it (sentence, state) or as the model sees
it (cameras). Versions whose images and prompt are equal for the model share one prefix: it is
computed once, and noise and, for π0, the state differ behind it.

Dims: v versions, n noise seeds, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8

from piston.inference.policy import Policy
from piston.inspection.frames import Frame, camera_names, state_dims
from piston.models.flow import Pi0
from piston.models.model import ActOptions
from piston.progress import Progress, no_progress
from piston.serialization import register
from piston.transforms import Data

T = TypeVar("T")

# Prefixes that are processed together, and rows that are denoised together.
_PREFIXES, _ROWS = 16, 128


@register("inspection_box")
@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle of a camera's image as the model sees it; its sides are shares from 0 to 1."""

    camera: str
    left: float
    top: float
    right: float
    bottom: float

    def __post_init__(self) -> None:
        if not (0 <= self.left < self.right <= 1 and 0 <= self.top < self.bottom <= 1):
            raise ValueError(
                f"A covered rectangle is left {self.left}, top {self.top}, right {self.right}, "
                f"bottom {self.bottom}; expected shares of the image between 0 and 1, in order."
            )

    def pixels(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of an image; at least one of each."""
        top, left = int(self.top * height), int(self.left * width)
        bottom, right = max(top + 1, round(self.bottom * height)), round(self.right * width)
        return slice(top, bottom), slice(left, max(left + 1, right))


@register("intervention")
@dataclasses.dataclass(frozen=True)
class Intervention:
    """What is changed in an observation; `Intervention()` changes nothing.

    Cameras are named by the model's slots.
    """

    # The sentence; None leaves it as it is.
    prompt: str | None = None
    # Cameras that are taken out of attention: the model has no token of them.
    off: tuple[str, ...] = ()
    # Cameras that show a black image.
    black: tuple[str, ...] = ()
    # Cameras that show another image, in the model's size: one that the model may well see.
    shown: Mapping[str, UInt8[np.ndarray, "_ _ 3"]] = dataclasses.field(default_factory=dict)
    # Rectangles that are covered with the mean colour of the image.
    covered: tuple[Box, ...] = ()
    # Dimensions of the state, by name, and what is added to them in the robot's units.
    state: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def on_robot(self, policy: Policy, observation: Mapping[str, Any]) -> Data:
        """Return the observation with another sentence or state. Others are not changed."""
        changed = dict(observation)
        if self.prompt is not None:
            changed["prompt"] = self.prompt
        if self.state:
            known = {dim.name: dim for dim in state_dims(policy, observation)}
            for name, amount in self.state.items():
                if name not in known:
                    raise LookupError(f"There is no state {name!r}; there is {', '.join(known)}.")
                dim = known[name]
                value = np.array(changed[dim.key], dtype=np.float64)
                value.reshape(-1)[dim.position] += amount
                changed[dim.key] = value.astype(np.float32)
        return changed

    def on_model(self, seen: Data) -> Data:
        """Return the model's input with changed cameras."""
        images, masks = dict(seen["image"]), dict(seen["image_mask"])
        boxed = [box.camera for box in self.covered]
        for camera in (*self.off, *self.black, *self.shown, *boxed):
            if camera not in images:
                raise LookupError(f"There is no camera {camera!r}; there is {', '.join(images)}.")
        for camera, image in self.shown.items():
            if image.shape != images[camera].shape:
                raise ValueError(
                    f"The image shown to {camera} has shape {image.shape}; expected "
                    f"{images[camera].shape}, as the model sees it."
                )
            images[camera] = image
        for camera in self.black:
            images[camera] = np.zeros_like(images[camera])
        for box in self.covered:
            image = images[box.camera].copy()
            rows, columns = box.pixels(*image.shape[:2])
            image[rows, columns] = seen["image"][box.camera].mean((0, 1)).round()
            images[box.camera] = image
        for camera in self.off:
            masks[camera] = np.False_
        return {**seen, "image": images, "image_mask": masks}


class Probe:
    """Answers interventions. `seeds` are those of the noise that every version starts from.

    A model that decodes tokens starts from no noise: then there is one answer per version.
    """

    def __init__(self, policy: Policy, seeds: Iterable[int] = range(8)) -> None:
        self.policy = policy
        config = policy.model.config
        chunk = (config.action_horizon, config.action_dim)
        draws = [np.random.default_rng(seed).standard_normal(chunk, np.float32) for seed in seeds]
        if not draws:
            raise ValueError("A probe needs at least one seed of the noise; none was given.")
        self.noise = np.stack(draws) if config.denoises else None
        # Counts what was computed.
        self.num_prefixes = self.num_chunks = 0

    @property
    def num_seeds(self) -> int:
        """How many chunks each version has."""
        return 1 if self.noise is None else len(self.noise)

    def chunks(
        self,
        frame: Frame | Mapping[str, Any],
        interventions: Sequence[Intervention],
        progress: Progress = no_progress,
    ) -> Float[np.ndarray, "v n h a"]:
        """Return the chunks of every version and seed, in the robot's units."""
        return self.ask([(frame, one) for one in interventions], progress)

    def ask(
        self,
        questions: Sequence[tuple[Frame | Mapping[str, Any], Intervention]],
        progress: Progress = no_progress,
    ) -> Float[np.ndarray, "v n h a"]:
        """Return the same for versions of different frames."""
        prepared = [self.prepare(frame, intervention) for frame, intervention in questions]
        rows: dict[bytes, list[int]] = {}  # the versions of each prefix
        for number, seen in enumerate(prepared):
            rows.setdefault(_prefix_of(seen), []).append(number)
        answers: list[np.ndarray | None] = [None] * len(prepared)
        done = 0
        for group in _batches(rows.values(), self.num_seeds):
            found = self._answer([[prepared[number] for number in one] for one in group])
            for number, chunk in zip(itertools.chain(*group), found, strict=True):
                answers[number] = chunk
            done += len(found)
            progress(done, len(prepared))
        return np.stack([answer for answer in answers if answer is not None])

    def prepare(self, frame: Frame | Mapping[str, Any], intervention: Intervention) -> Data:
        """Return the model's input of one version."""
        observation = frame.observation if isinstance(frame, Frame) else frame
        changed = intervention.on_robot(self.policy, observation)
        return intervention.on_model(self.policy.prepare(changed).inputs)

    def pictures(
        self, frame: Frame | Mapping[str, Any], intervention: Intervention | None = None
    ) -> dict[str, UInt8[np.ndarray, "_ _ 3"]]:
        """Return the images that the model sees, by slot; absent cameras are not among them.

        π0-FAST also attends to the black image of a slot that the robot has no camera for.
        """
        seen = self.prepare(frame, intervention or Intervention())
        cameras = camera_names(self.policy) or seen["image"]
        images = ((slot, image) for slot, image in seen["image"].items() if slot in cameras)
        return {slot: image for slot, image in images if seen["image_mask"][slot]}

    @torch.no_grad()
    def _answer(self, group: Sequence[Sequence[Data]]) -> list[np.ndarray]:
        """Return (n, h, a) for each version; every prefix of the group has as many versions."""
        policy, model = self.policy, self.policy.model
        observation = policy.runner.observe([versions[0] for versions in group])
        seen = list(itertools.chain(*group))
        self.num_prefixes += len(group)
        self.num_chunks += len(seen)
        if self.noise is None:
            drawn = model.act(observation).cpu().numpy().repeat(len(group[0]), 0)[:, None]
        else:
            assert isinstance(model, Pi0)
            seeds = len(self.noise)
            cache = model.respond(observation)[0].repeat(len(group[0]) * seeds)
            states = np.stack([one["state"] for one in seen]).astype(np.float32)
            state = torch.from_numpy(states).to(policy.device).repeat_interleave(seeds, 0)
            noise = torch.from_numpy(np.tile(self.noise, (len(seen), 1, 1))).to(policy.device)
            options = ActOptions(num_steps=policy.num_steps)
            cache = dataclasses.replace(cache, state=state)
            actions = model.denoise(cache, noise, options)[-1].cpu().numpy()
            drawn = actions.reshape(len(seen), seeds, *actions.shape[1:])
        return [
            np.stack([policy.to_robot(one, chunk)["actions"] for chunk in chunks])
            for one, chunks in zip(seen, drawn, strict=True)
        ]


def _prefix_of(seen: Data) -> bytes:
    """Return a digest of all that the model's prefix depends on: not of absent cameras' pixels."""
    digest = hashlib.blake2b(digest_size=16)
    for camera, image in seen["image"].items():
        is_present = bool(seen["image_mask"][camera])
        digest.update(f"{camera} {is_present}".encode())
        if is_present:
            digest.update(np.ascontiguousarray(image).tobytes())
    for key in ("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "writes_text"):
        if key in seen:
            digest.update(key.encode() + np.ascontiguousarray(seen[key]).tobytes())
    return digest.digest()


def _batches(groups: Iterable[list[int]], seeds: int) -> Iterator[list[list[int]]]:
    """Yield prefixes with equally many versions together, within the limits of a batch."""
    by_size: dict[int, list[list[int]]] = {}
    for versions in groups:
        for part in _split(versions, max(1, _ROWS // seeds)):
            by_size.setdefault(len(part), []).append(part)
    for size, parts in by_size.items():
        yield from _split(parts, max(1, min(_PREFIXES, _ROWS // (size * seeds))))


def _split(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))

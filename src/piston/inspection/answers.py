"""What the page of `piston inspect` shows: a moment of the data set, and a policy's answers to it.

Everything is given as plain JSON values in the robot's units.

Dims: n noise seeds, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import functools
import io
import secrets
import threading
import time
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from piston.inference.policy import Policy
from piston.inspection.frames import Frame, Frames, camera_names, state_dims
from piston.inspection.influence import in_one_number
from piston.inspection.occlusion import Occlusion
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import as_json, seed_spread

# Seeds of the noise behind each answer, as in the overview. They share one prefix, so that the time
# grows slowly with them: the demo's policy takes 72 ms on one core, and 50 ms with one seed.
NUM_SEEDS = 8
_MAP_SEEDS = 2
# Moments with their images in full size, and pictures and unchanged answers that are kept.
_NUM_FRAMES, _NUM_KEPT = 32, 512


class Answers:
    """Answers about the frames of one data set by one policy, to any number of threads."""

    def __init__(
        self, policy: Policy, frames: Frames, title: str = "", num_seeds: int = NUM_SEEDS
    ) -> None:
        self._frames, self._title = frames, title
        self._probe = Probe(policy, range(num_seeds))
        self._scale = frames.action_scale()
        # The decoders of a data set serve one thread at a time.
        self._reading = threading.Lock()
        self.frame = functools.lru_cache(_NUM_FRAMES)(self._frame)
        self.picture = functools.lru_cache(_NUM_KEPT)(self._picture)
        self._unchanged = functools.lru_cache(_NUM_KEPT)(self._ask)
        # Of a map only the places matter: all its versions start from the same noise.
        self._map_probe = Probe(policy, range(min(num_seeds, _MAP_SEEDS)))
        self._background = functools.lru_cache(_NUM_KEPT)(self._read_background)

    def about(self) -> dict[str, Any]:
        """Return what does not depend on the moment. Raises an error if no frame fits the policy.

        `run` differs in every run of the server: pictures that a browser keeps belong to it.
        """
        frames, policy = self._frames, self._probe.policy
        first = self.frame(next(iter(frames.episodes)), 0)
        names = camera_names(policy)
        scales = zip(frames.action_names, self._scale, strict=True)
        about = {
            "title": self._title,
            "run": secrets.token_hex(4),
            "episodes": [[index, length] for index, length in frames.episodes.items()],
            "fps": float(frames.fps),
            "prompts": frames.tasks,
            "cameras": [
                {
                    "slot": slot,
                    "name": names.get(slot, slot),
                    "height": image.shape[0],
                    "width": image.shape[1],
                }
                for slot, image in self._probe.pictures(first).items()
            ],
            "states": [
                {"name": dim.name, "std": _deviation(frames.state_values(dim))}
                for dim in state_dims(policy, first.observation)
            ],
            "actions": [{"name": name, "std": scale} for name, scale in scales],
            "seeds": 1 if self._probe.noise is None else len(self._probe.noise),
        }
        return as_json(about)

    def _frame(self, episode: int, number: int) -> Frame:
        with self._reading:
            return self._frames[episode, number]

    def moment(self, episode: int, number: int) -> dict[str, Any]:
        """Return the state, the sentence, and what was recorded from here on."""
        frame = self.frame(episode, number)
        dims = state_dims(self._probe.policy, frame.observation)
        values = [np.ravel(frame.observation[dim.key])[dim.position] for dim in dims]
        recorded = frame.recorded[frame.is_real]
        return as_json({"prompt": frame.prompt, "state": values, "recorded": recorded})

    def _picture(self, episode: int, number: int, camera: str) -> bytes:
        """Return a camera's image as the model sees it, as PNG."""
        images = self._probe.pictures(self.frame(episode, number))
        if camera not in images:
            raise LookupError(f"There is no camera {camera!r}; there is {', '.join(images)}.")
        buffer = io.BytesIO()
        # Speed rather than size: the picture does not leave the machine.
        Image.fromarray(images[camera]).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def act(self, episode: int, number: int, change: Intervention) -> dict[str, Any]:
        """Return the unchanged chunk, the changed one and the difference between them."""
        started = time.perf_counter()
        base = self._unchanged(episode, number)
        changed = None if change == Intervention() else self._ask(episode, number, change)
        answer = {
            "base": _fan(base),
            "changed": None if changed is None else _fan(changed),
            "effect": None if changed is None else self._effect(base, changed),
            "note": None if change.prompt is None else self._note(episode, number, change),
        }
        return as_json({**answer, "ms": 1e3 * (time.perf_counter() - started)})

    def _note(self, episode: int, number: int, change: Intervention) -> str | None:
        """Return what there is to say about a sentence: whether the model reads all of it."""
        seen = self._probe.prepare(self.frame(episode, number), change)
        mask = seen.get("tokenized_prompt_mask")
        if mask is None or not mask.all():
            return None
        return (
            f"The sentence fills all {mask.size} tokens that the model reads. What is beyond them "
            "is cut off and has no effect."
        )

    def occlusion(
        self, episode: int, number: int, camera: str, actions: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return how much covering each part of a picture changes some actions, or all of them."""
        started = time.perf_counter()
        frame, chosen = self.frame(episode, number), actions or None
        occlusion = Occlusion(self._map_probe, self._frames, actions=chosen)
        found = occlusion.map(frame, camera, self._background(camera))
        sides = [[cell.left, cell.top, cell.right, cell.bottom] for cell in found.cells]
        ms = 1e3 * (time.perf_counter() - started)
        return as_json({"cells": sides, "value": found.value, "ms": ms})

    def _read_background(self, camera: str) -> UInt8[np.ndarray, "_ _ 3"]:
        with self._reading:
            return Occlusion(self._map_probe, self._frames).background(camera)

    def _ask(
        self, episode: int, number: int, change: Intervention | None = None
    ) -> Float[np.ndarray, "n h a"]:
        frame = self.frame(episode, number)
        return self._probe.chunks(frame, [change or Intervention()])[0]

    def _effect(
        self, base: Float[np.ndarray, "n h a"], changed: Float[np.ndarray, "n h a"]
    ) -> dict[str, Any]:
        """Return the mean absolute change of every action, and all in one number.

        That is the root mean square in standard deviations of the recorded actions, and in spreads
        over the seeds, where there are several.
        """
        effect: dict[str, Any] = {
            "per_action": np.abs(changed - base).mean((0, 1)),
            "strength": in_one_number(changed - base, self._scale),
            "spread": None,
            "in_spreads": None,
        }
        if len(base) > 1:
            spread = seed_spread(base)
            noise = in_one_number(spread, self._scale)
            effect["spread"] = spread.mean(0)
            effect["in_spreads"] = effect["strength"] / noise if noise else None
        return effect


def _fan(chunks: Float[np.ndarray, "n h a"]) -> dict[str, Any]:
    """Return the mean over seeds, and between which values they lie."""
    return {"mean": chunks.mean(0), "low": chunks.min(0), "high": chunks.max(0)}


def _deviation(values: Float[np.ndarray, " n"] | None) -> float:
    """Return the scale of a slider: 1 for numbers that never move or whose column is unknown."""
    return (0.0 if values is None else float(values.std())) or 1.0

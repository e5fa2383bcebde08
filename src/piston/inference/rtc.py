"""Real-time chunking (RTC): the field `rtc` of a request, parsed and checked once.

A robot that executes one chunk while the next is computed sends the actions that are still ahead;
the new chunk continues them. `RobotPipeline.prepare` parses the field into a `Continuation`; the
runner stacks those of a batch into what the model takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from piston.config import DataConfig
from piston.models.configs import ModelConfig
from piston.models.integrator import guidance_weights

_STEPS = ("delay", "execute_horizon")


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A checked request to continue the old chunk, in the model's steps."""

    # From now on, padded to a whole chunk; in the robot's units, until `RobotPipeline.prepare` has
    # converted it to the model's space.
    previous_chunk: Float[np.ndarray, "_ a"]
    # The actions that are executed before the new chunk arrives.
    num_committed: int
    # Of the guidance; None: the model was trained to continue.
    weights: Float[Tensor, " h"] | None = None


class RealTimeChunking:
    """What one robot may request of a model, and how its control steps become the model's."""

    def __init__(self, config: ModelConfig, data: DataConfig, *, can_guide: bool) -> None:
        self._config = config
        self._stride = data.action_stride
        self._horizon = data.steps_read(config.action_horizon)
        # The largest delay that the model was trained with, in control steps. The last of the
        # committed actions has to be one of the model's, not one between two.
        self._max_delay = (config.max_delay - 1) * self._stride + 1 if config.max_delay else 0
        guided = ["guided"] if config.denoises and can_guide else []
        self._kinds = ["trained", *guided] if self._max_delay else guided

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client has to know to ask for real-time chunking."""
        delay = {"max_delay": self._max_delay} if self._max_delay else {}
        return {"kinds": self._kinds, **delay}

    def parse(self, rtc: Any) -> Continuation:
        """Check the field `rtc` of a request. Raises ValueError if anything in it is wrong."""
        if not self._kinds:
            raise ValueError(
                "Real-time chunking needs a flow model, and for a compiled file one that was "
                f"trained with --max-delay; this is {self._config.family}."
            )
        expected = {"previous_chunk", *_STEPS}
        if not isinstance(rtc, Mapping) or not expected <= rtc.keys():
            found = f"a dictionary of {sorted(rtc)}" if isinstance(rtc, Mapping) else repr(rtc)[:40]
            raise ValueError(f"rtc is {found}; expected {', '.join(sorted(expected))}.")
        delay, execute_horizon = (whole_number(rtc[key], f"rtc.{key}") for key in _STEPS)
        previous = np.asarray(rtc["previous_chunk"])
        if previous.ndim != 2 or not 1 <= len(previous) <= self._horizon:
            raise ValueError(
                f"rtc.previous_chunk has shape {previous.shape}; expected (steps, action dim) with "
                f"1 to {self._horizon} steps."
            )
        if delay > len(previous):
            raise ValueError(
                f"rtc.delay is {delay} steps, but only {len(previous)} of the old chunk are left "
                "to be committed to."
            )
        kind = rtc.get("kind", self._kinds[0])
        if kind not in self._kinds:
            advice = " Train it with --max-delay for the other." if kind == "trained" else ""
            raise ValueError(
                f"rtc.kind is {repr(kind)[:40]}; this checkpoint can be "
                f"{' or '.join(self._kinds)}.{advice}"
            )
        if kind == "trained" and delay > self._max_delay:
            raise ValueError(
                f"rtc.delay is {delay} control steps, but the policy was trained with delays of at "
                f"most {self._max_delay} (--max-delay {self._config.max_delay}, {self._stride} "
                "control steps per action). Make inference faster, ask with rtc.kind 'guided', or "
                "train with larger delays."
            )
        # Its last action is repeated to the length of a chunk.
        padding = np.repeat(previous[-1:], self._horizon - len(previous), axis=0)
        previous = np.concatenate([previous, padding])
        # One of the model's actions is `stride` of the robot's, and those between two are
        # interpolated: the model's first action that is not before the last committed one is
        # committed as well.
        num_committed = 0 if delay == 0 else -(-(delay - 1) // self._stride) + 1
        if kind == "trained":
            return Continuation(previous, num_committed)
        guidance_weights(self._horizon, delay, execute_horizon)  # refuses what does not fit
        num_executed = -(-execute_horizon // self._stride)
        num_committed = min(num_committed, self._config.action_horizon - num_executed)
        weights = guidance_weights(self._config.action_horizon, num_committed, num_executed)
        return Continuation(previous, num_committed, weights)


def whole_number(value: Any, name: str) -> int:
    """Return a field of a request as an integer ≥ 0. Raises ValueError if it is not one."""
    number = np.asarray(value)
    if number.ndim or not np.issubdtype(number.dtype, np.integer) or number < 0:
        raise ValueError(f"{name} is {repr(value)[:40]}; expected a whole number, 0 or more.")
    return int(number)

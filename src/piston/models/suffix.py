"""The suffix of π0 and π0.5: state, noisy actions and time as tokens of the action expert.

`TokenSuffix` (π0) gives the state a token and mixes time into every action token; `AdaptiveSuffix`
(π0.5) has action tokens only and hands time to the expert's norms. Both are small and stay in
float32.

The suffix of a distilled model also reads a target time: it predicts the mean velocity from the
time to the target. Where both are equal, as in ordinary denoising, this part is exactly zero.

Dims: b batch, h horizon, a action dim, s suffix tokens, d width, k times.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from piston.models.configs import Pi0Config

_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0


def embed_time(time: Float[Tensor, " k"], width: int) -> Float[Tensor, "k d"]:
    """Return sines, then cosines, of time with geometrically spaced periods."""
    # float64: with a period of 4e-3, float32 angles would already cost four digits.
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time.device)
    period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** fraction
    angle = 2 * math.pi * time.double()[:, None] / period
    return torch.cat((angle.sin(), angle.cos()), dim=-1).float()


class TimeEmbedding(nn.Module):
    """Embed a time and, for a distilled model, the distance to its target time."""

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.width = config.action_expert.width
        self.target = None if config.distilled_steps is None else ZeroMap(self.width)

    def forward(
        self, time: Float[Tensor, " k"], target: Float[Tensor, " k"] | None = None
    ) -> Float[Tensor, "k d"]:
        embedded = embed_time(time, self.width)
        if target is None:
            return embedded
        if self.target is None:
            raise ValueError(
                "The model was not distilled: it has no target times. Run `piston distill` first."
            )
        return embedded + self.target(embedded - embed_time(target, self.width))


class ZeroMap(nn.Linear):
    """A square matrix, in float32, that starts as zero."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class TokenSuffix(nn.Module):
    """π0: one state token, then the actions, each mixed with time."""

    # Whether the state is a token, and a block of the attention mask, before the actions.
    has_state = True

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.width = config.action_expert.width
        self.state = nn.Linear(config.action_dim, self.width)
        self.action_in = nn.Linear(config.action_dim, self.width)
        self.time_action_in = nn.Linear(2 * self.width, self.width)
        self.time_action_out = nn.Linear(self.width, self.width)
        self.action_out = nn.Linear(self.width, config.action_dim)
        self.time = TimeEmbedding(config)

    def condition(
        self, time: Float[Tensor, " k"], target: Float[Tensor, " k"] | None = None
    ) -> Float[Tensor, "k d"]:
        """Return the part of `time_action_in` that depends on time alone."""
        weight = self.time_action_in.weight[:, self.width :]
        return nn.functional.linear(self.time(time, target), weight, self.time_action_in.bias)

    def tokens(
        self,
        state: Float[Tensor, "b a"],
        noisy_actions: Float[Tensor, "b h a"],
        condition: Float[Tensor, "#b #h d"],
    ) -> Float[Tensor, "b s d"]:
        weight = self.time_action_in.weight[:, : self.width]
        mixed = nn.functional.linear(self.action_in(noisy_actions), weight) + condition
        actions = self.time_action_out(nn.functional.silu(mixed))
        return torch.cat((self.state(state)[:, None], actions), dim=1)


class AdaptiveSuffix(nn.Module):
    """π0.5: the actions alone; the state is in the prompt, and time conditions the norms."""

    has_state = False

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.width = config.action_expert.width
        self.action_in = nn.Linear(config.action_dim, self.width)
        self.time_in = nn.Linear(self.width, self.width)
        self.time_out = nn.Linear(self.width, self.width)
        self.action_out = nn.Linear(self.width, config.action_dim)
        self.time = TimeEmbedding(config)

    def condition(
        self, time: Float[Tensor, " k"], target: Float[Tensor, " k"] | None = None
    ) -> Float[Tensor, "k d"]:
        hidden = nn.functional.silu(self.time_in(self.time(time, target)))
        return nn.functional.silu(self.time_out(hidden))

    def tokens(
        self,
        state: Float[Tensor, "b _"],  # noqa: ARG002
        noisy_actions: Float[Tensor, "b h a"],
        condition: Float[Tensor, "#b #h d"],  # noqa: ARG002
    ) -> Float[Tensor, "b s d"]:
        return self.action_in(noisy_actions)

"""The suffix: how state, noisy actions and time reach the action expert.

π0 and π0.5 differ here and nowhere else: `TokenSuffix` gives the state a token and mixes time into
every action token; `AdaptiveSuffix` has action tokens only and hands time to the expert's norms.
Both are small and stay in float32.

Dims: b batch, k times, h horizon, a action dim, d width of the action expert, s suffix tokens.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
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


class TokenSuffix(nn.Module):
    """π0: one state token, then the actions, each mixed with time."""

    # Whether the suffix is more than one block of the attention mask.
    has_blocks = True

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.horizon, self.width = config.action_horizon, config.action_expert.width
        self.state = nn.Linear(config.action_dim, self.width)
        self.action_in = nn.Linear(config.action_dim, self.width)
        self.time_action_in = nn.Linear(2 * self.width, self.width)
        self.time_action_out = nn.Linear(self.width, self.width)
        self.action_out = nn.Linear(self.width, config.action_dim)

    def check_state(self, state: Float[Tensor, "b a"]) -> None:
        if state.ndim != 2 or state.shape[1] != self.state.in_features:
            raise ValueError(
                f"state has shape {tuple(state.shape)}, expected (batch, {self.state.in_features}):"
                " π0 reads a state as wide as its actions. Pad it with zeros."
            )

    def starts_block(self, device: torch.device) -> Bool[Tensor, " s"]:
        """Return which tokens start a block: the state and the first action."""
        return torch.arange(self.horizon + 1, device=device) < 2

    def condition(self, time: Float[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Return the part of `time_action_in` that depends on time alone."""
        weight = self.time_action_in.weight[:, self.width :]
        return nn.functional.linear(embed_time(time, self.width), weight, self.time_action_in.bias)

    def tokens(
        self,
        state: Float[Tensor, "b a"],
        noisy_actions: Float[Tensor, "b h a"],
        condition: Float[Tensor, "#b d"],
    ) -> Float[Tensor, "b s d"]:
        weight = self.time_action_in.weight[:, : self.width]
        mixed = nn.functional.linear(self.action_in(noisy_actions), weight) + condition[:, None]
        actions = self.time_action_out(nn.functional.silu(mixed))
        return torch.cat((self.state(state)[:, None], actions), dim=1)


class AdaptiveSuffix(nn.Module):
    """π0.5: the actions alone; the state is in the prompt, and time conditions the norms."""

    has_blocks = False

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.horizon, self.width = config.action_horizon, config.action_expert.width
        self.action_in = nn.Linear(config.action_dim, self.width)
        self.time_in = nn.Linear(self.width, self.width)
        self.time_out = nn.Linear(self.width, self.width)
        self.action_out = nn.Linear(self.width, config.action_dim)

    def check_state(self, state: Float[Tensor, "b a"]) -> None:
        """Accept any state: the model reads it from the prompt."""

    def starts_block(self, device: torch.device) -> Bool[Tensor, " s"]:
        """Return which tokens start a block: the first action."""
        return torch.arange(self.horizon, device=device) < 1

    def condition(self, time: Float[Tensor, " k"]) -> Float[Tensor, "k d"]:
        hidden = nn.functional.silu(self.time_in(embed_time(time, self.width)))
        return nn.functional.silu(self.time_out(hidden))

    def tokens(
        self,
        state: Float[Tensor, "b a"],  # noqa: ARG002
        noisy_actions: Float[Tensor, "b h a"],
        condition: Float[Tensor, "#b d"],  # noqa: ARG002
    ) -> Float[Tensor, "b s d"]:
        return self.action_in(noisy_actions)

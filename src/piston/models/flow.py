"""π0 and π0.5: flow matching over action chunks, conditioned on images, prompt and state.

The prefix (images, prompt) runs through the VLM once and leaves keys and values in every layer;
the suffix (state, noisy actions, time) runs through the action expert and reads them, once per
step of the integrator or once per draw of noise in training.

    x_t = t · noise + (1 − t) · actions        velocity = noise − actions        t: 1 noise, 0 data

Knows tensors; knows nothing of robots, normalisation, checkpoints or optimizers.

Dims: b batch, n draws of noise and time, h horizon, a action dim, s suffix tokens, d width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from piston.models import joint, masks
from piston.models.configs import Pi0Config
from piston.models.gemma import Expert, Memory, Modulation, Rope
from piston.models.prefix import Prefix, PrefixReader
from piston.models.suffix import AdaptiveSuffix, TokenSuffix
from piston.observation import Actions, Observation


@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """All that the suffix needs of an observation, made once per request."""

    memories: list[Memory]
    state: Float[Tensor, "b a"]
    # Of the suffix tokens: they stand behind each sample's own prefix.
    rope: Rope
    mask: Bool[Tensor, "#b s t"] | None

    def repeat(self, times: int) -> PrefixCache:
        """Every sample `times` over, side by side."""

        def rows(value: Tensor) -> Tensor:
            return value if value.shape[0] == 1 else value.repeat_interleave(times, 0)

        return PrefixCache(
            memories=[memory.repeat(times) for memory in self.memories],
            state=self.state.repeat_interleave(times, 0),
            rope=Rope(*map(rows, self.rope)),
            mask=None if self.mask is None else rows(self.mask),
        )


@dataclasses.dataclass(frozen=True)
class Condition:
    """All that depends on time alone, for one time per row."""

    vector: Float[Tensor, "k d"]
    modulations: list[Modulation]

    def at(self, row: int) -> Condition:
        """One time, to be shared by a whole batch."""
        parts = [None if part is None else part[row : row + 1] for part in self.modulations]
        return Condition(self.vector[row : row + 1], parts)


class Pi0(PrefixReader):
    """A flow model; `config.pi05` chooses the suffix and the action expert's norms, here only."""

    config: Pi0Config

    def __init__(self, config: Pi0Config) -> None:
        super().__init__(config)
        self.action_expert = Expert(config.action_expert, adaptive=config.pi05)
        self.suffix = (AdaptiveSuffix if config.pi05 else TokenSuffix)(config)

    def loss(
        self,
        observation: Observation,
        actions: Actions,
        noise: Float[Tensor, "b h a"] | Float[Tensor, "b n h a"] | None = None,
        time: Float[Tensor, " b"] | Float[Tensor, "b n"] | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b h"] | Float[Tensor, "b n h"]:
        """Mean squared error of the velocity per sample (and draw) and step."""
        error = self.velocity_error(
            observation, actions, noise, time, num_draws=num_draws, generator=generator
        )
        return error.mean(-1)

    def velocity_error(
        self,
        observation: Observation,
        actions: Actions,
        noise: Float[Tensor, "b h a"] | Float[Tensor, "b n h a"] | None = None,
        time: Float[Tensor, " b"] | Float[Tensor, "b n"] | None = None,
        *,
        num_draws: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b h a"] | Float[Tensor, "b n h a"]:
        """Squared error of every number of the velocity: what `loss` takes the mean of.

        With `num_draws`, or with noise or time that have an axis n, several draws share one
        prefix and the result has that axis; it equals as many separate calls.
        """
        if num_draws is None and noise is not None and noise.ndim == 4:
            num_draws = noise.shape[1]
        if num_draws is None and time is not None and time.ndim == 2:
            num_draws = time.shape[1]
        if num_draws is not None and num_draws < 1:
            raise ValueError(f"num_draws must be at least 1, is {num_draws}.")
        self._check_chunk("actions", actions, observation.batch_size)
        rows = (len(actions), num_draws or 1)
        if noise is None:
            noise = standard_normal((*rows, *actions.shape[1:]), actions.device, generator)
        if time is None:
            time = sample_time(rows, actions.device, generator)
        noise = _with_draws("noise", noise, (*rows, *actions.shape[1:]))
        time = _with_draws("time", time, rows)

        t = time[:, :, None, None]
        noisy_actions = t * noise + (1 - t) * actions[:, None]
        cache = self.prefill(observation)
        if rows[1] > 1:
            cache = cache.repeat(rows[1])
        velocity = self.velocity(noisy_actions.flatten(0, 1), time.flatten(), cache)
        error = (velocity.view(noise.shape) - (noise - actions[:, None])).square()
        return error[:, 0] if num_draws is None else error

    @torch.no_grad()
    def sample_actions(
        self,
        observation: Observation,
        noise: Float[Tensor, "b h a"] | None = None,
        num_steps: int = 10,
        generator: torch.Generator | None = None,
    ) -> Actions:
        """Integrate from noise (time 1) to actions (time 0) in equal Euler steps."""
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, is {num_steps}.")
        if noise is None:
            shape = (observation.batch_size, self.config.action_horizon, self.config.action_dim)
            noise = standard_normal(shape, observation.device, generator)
        self._check_chunk("noise", noise, observation.batch_size)
        cache = self.prefill(observation)
        times = 1 - torch.arange(num_steps, device=noise.device) / num_steps
        condition = self.condition(times)
        actions = noise.float()
        for step in range(num_steps):
            actions = actions - self.velocity(actions, condition.at(step), cache) / num_steps
        return actions

    def prefill(self, observation: Observation) -> PrefixCache:
        """Read images and prompt once; the cache has room for the suffix behind them."""
        self.suffix.check_state(observation.state)
        prefix, state = self.embed_prefix(observation), observation.state
        packing, head_dim = prefix.packing, self.config.vlm.head_dim
        starts_block = self.suffix.starts_block(state.device)
        # In training the suffix's keys carry gradients and make longer memories of their own.
        room = 0 if torch.is_grad_enabled() else packing.size + len(starts_block)
        memories = joint.remember(self.vlm, **self._reading(prefix, room))

        lengths = packing.lengths
        behind = packing.size if lengths is None else lengths[:, None]
        steps = torch.arange(len(starts_block), device=state.device)[None]
        mask = None
        if self.suffix.has_blocks or lengths is not None:
            mask = masks.suffix_mask(lengths, packing.size, starts_block)
        return PrefixCache(memories, state.float(), Rope.at(behind + steps, head_dim), mask)

    def velocity(
        self,
        noisy_actions: Float[Tensor, "b h a"],
        time: Float[Tensor, " b"] | Condition,
        cache: PrefixCache,
    ) -> Float[Tensor, "b h a"]:
        """Direction from the actions (time 0) to the noise (time 1).

        Instead of the time it takes `condition(time)`, made beforehand for many times at once.
        """
        output = self.suffix_output(noisy_actions, time, cache)
        return self.suffix.action_out(output[:, -noisy_actions.shape[1] :].float())

    def condition(self, time: Float[Tensor, " k"]) -> Condition:
        vector = self.suffix.condition(time.float())
        return Condition(vector, self.action_expert.modulate(vector.to(self.compute_dtype)))

    def prefix_output(self, observation: Observation) -> Float[Tensor, "b t d"]:
        """The VLM's output per token of the padded prefix. The model itself never needs it."""
        prefix = self.embed_prefix(observation)
        output, _ = joint.read(self.vlm, **self._reading(prefix, room=0))
        return prefix.packing.unpack(output)

    def suffix_output(
        self,
        noisy_actions: Float[Tensor, "b h a"],
        time: Float[Tensor, " b"] | Condition,
        cache: PrefixCache,
    ) -> Float[Tensor, "b s d"]:
        """The action expert's output for every suffix token."""
        batch = len(cache.state)
        self._check_chunk("noisy_actions", noisy_actions, batch)
        if not isinstance(time, Condition) and time.shape not in ((batch,), (1,)):
            raise ValueError(
                f"time has shape {tuple(time.shape)}, expected one number per sample: ({batch},)."
            )
        condition = time if isinstance(time, Condition) else self.condition(time)
        tokens = self.suffix.tokens(cache.state, noisy_actions.float(), condition.vector)
        output, _ = joint.read(
            self.action_expert,
            tokens.to(self.compute_dtype),
            cache.memories,
            cache.rope,
            cache.mask,
            condition.modulations,
            self.gradient_checkpointing,
        )
        return output

    def unused_parameters(self) -> list[str]:
        """Names of parameters that no action depends on: the tail of the VLM's last layer."""
        last = f"vlm.layers.{self.config.vlm.depth - 1}."
        tail = (
            *(last + part for part in ("attention.query", "attention.output", "mlp_norm", "mlp")),
            "vlm.norm",
        )
        return [name for name, _ in self.named_parameters() if name.startswith(tail)]

    def _check_chunk(self, name: str, value: Tensor, batch: int) -> None:
        expected = (batch, self.config.action_horizon, self.config.action_dim)
        if value.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {expected}: batch, "
                "action_horizon, action_dim."
            )

    def _reading(self, prefix: Prefix, room: int) -> dict[str, Any]:
        """How the VLM reads a prefix: one block, left-aligned, counted from zero."""
        tokens, packing = prefix.tokens, prefix.packing
        positions = torch.arange(packing.size, device=tokens.device)[None]
        return {
            "tokens": tokens,
            "memories": joint.empty_memories(self.vlm, len(tokens), room, tokens),
            "rope": Rope.at(positions, self.config.vlm.head_dim),
            "mask": masks.padding_mask(packing.lengths, packing.size),
            "gradient_checkpointing": self.gradient_checkpointing,
        }


def standard_normal(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    return torch.randn(shape, device=device, generator=generator)


def sample_time(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """0.001 + 0.999 · Beta(1.5, 1): more often noisy than clean, never quite clean."""
    uniform = torch.rand(shape, device=device, generator=generator)
    return 0.001 + 0.999 * uniform ** (1 / 1.5)


def _with_draws(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The value with its axis of draws, which a single draw may leave out."""
    if value.shape == shape:
        return value
    if shape[1] == 1 and value.shape == (shape[0], *shape[2:]):
        return value[:, None]
    raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}.")

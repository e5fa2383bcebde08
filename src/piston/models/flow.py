"""π0 and π0.5: flow matching over action chunks, conditioned on images, prompt and state.

The prefix (images, prompt) runs through the VLM once and leaves keys and values in every layer;
the suffix (state, noisy actions, time) runs through the action expert and attends to them, once per
step of the integrator or once per draw of noise in training.

    x_t = t · noise + (1 − t) · actions        velocity = noise − actions        t: 1 noise, 0 data

π0 and π0.5 differ in the suffix only (see `suffix`).

With `config.targets` the VLM also learns to write: a response text, which becomes part of the
prefix, and the actions as FAST tokens, which the action expert never attends to:

                         images prompt text FAST state actions
    text                   ■      ■     ◣    ·     ·      ·     cross-entropy
    FAST                   ■      ■     ■    ◣     ·      ·     cross-entropy
    state, actions         ■      ■     ■    ·     ■      ■     flow; with `insulate` the keys and
                                                                values of the rest are detached

Dims: b batch, n noise draws or candidates, h horizon, a action dim, s suffix tokens, d width,
k times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from piston.models import language, masks
from piston.models.configs import Pi0Config
from piston.models.gemma import Expert, KVCache, Mask, Rope, Tokens
from piston.models.integrator import integrate
from piston.models.masks import TokenGroup
from piston.models.model import ActOptions, Model, Prefix, Response
from piston.models.suffix import AdaptiveSuffix, TokenSuffix
from piston.observation import Actions, Observation


@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """All that the suffix needs of an observation, computed once per request."""

    caches: list[KVCache]
    state: Float[Tensor, "b a"]
    # Of the suffix tokens: they stand behind each sample's own prefix.
    rope: Rope
    mask: Mask

    def repeat(self, times: int) -> PrefixCache:
        """Return a cache of every sample repeated `times` in a row."""

        def rows(value: Tensor) -> Tensor:
            return value if value.shape[0] == 1 else value.repeat_interleave(times, 0)

        return PrefixCache(
            caches=[cache.repeat(times) for cache in self.caches],
            state=self.state.repeat_interleave(times, 0),
            rope=Rope(*map(rows, self.rope)),
            mask=None if self.mask is None else rows(self.mask),
        )


class Condition(NamedTuple):
    """All that depends on time alone, for one time per row."""

    vector: Float[Tensor, "k d"]
    modulations: list[Float[Tensor, "k 1 d3"]]

    def at(self, row: int) -> Condition:
        """Return one time, which a whole batch can share."""
        parts = [part[row : row + 1] for part in (self.vector, *self.modulations)]
        return Condition(parts[0], parts[1:])


class Pi0(Model):
    """A flow model; `config.pi05` chooses the suffix and the action expert's norms, here only.

    Actions, noise and times are annotated as plain tensors where a method checks their shapes.
    """

    config: Pi0Config

    def __init__(self, config: Pi0Config) -> None:
        super().__init__(config)
        self.action_expert = Expert(config.action_expert, adaptive=config.pi05)
        self.suffix = (AdaptiveSuffix if config.pi05 else TokenSuffix)(config)

    @property
    def experts(self) -> dict[str, Expert]:
        return {"vlm": self.vlm, "action_expert": self.action_expert}

    def draw(
        self, batch_size: int, num_draws: int = 1, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draw `noise` (b, n, h, a) and `time` (b, n)."""
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1, is {num_draws}.")
        chunk = (self.config.action_horizon, self.config.action_dim)
        return {
            "noise": torch.randn(batch_size, num_draws, *chunk, generator=generator),
            "time": sample_time((batch_size, num_draws), generator),
        }

    def training_losses(
        self, observation: Observation, actions: Tensor | None, draws: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return `velocity`: the squared error of every number of the velocity.

        Of a model with targets also `tokens`: the weighted cross-entropy of what it has to write.
        """
        if actions is None:
            raise ValueError(f"The loss of {self.config.family} needs actions; there are none.")
        losses: dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]] = {}
        if self.config.targets:
            prefix, inputs = self._inputs(observation)
            output, caches = self.vlm(*inputs)
            loss = language.next_token_loss(self.vlm, output, prefix.packing, observation)
            losses["tokens"] = self.config.token_loss_weight * loss
            cache = self._behind(prefix, caches, observation.state)
        else:
            cache = self.prefill(observation)
        error = self.velocity_error(cache, actions, draws["noise"], draws["time"])
        return {"velocity": error.mean(1), **losses}

    def velocity_error(
        self, cache: PrefixCache, actions: Tensor, noise: Tensor, time: Tensor
    ) -> Float[Tensor, "b n h a"]:
        """Return the squared error of the velocity for several draws that share one prefix.

        `noise` has shape (b, n, h, a) and `time` (b, n).
        """
        batch = len(cache.state)
        self._check_chunk("actions", actions, (batch,))
        self._check_chunk("noise", noise, (batch, *noise.shape[1:2]))
        if time.shape != noise.shape[:2]:
            raise ValueError(
                f"time has shape {tuple(time.shape)}, expected one number per draw of noise: "
                f"{tuple(noise.shape[:2])}."
            )
        t = time[:, :, None, None]
        noisy_actions = t * noise + (1 - t) * actions[:, None]
        if time.shape[1] > 1:
            cache = cache.repeat(time.shape[1])
        velocity = self.velocity(noisy_actions.flatten(0, 1), time.flatten(), cache)
        return (velocity.view(noise.shape) - (noise - actions[:, None])).square()

    def act_with(self, observation: Observation, options: ActOptions) -> Response:
        """Write the response text, if the model has one, and integrate from noise to actions.

        There are 10 steps by default.
        """
        if options.temperature:
            raise ValueError(f"{self.config.family} decodes no tokens: it can use no temperature.")
        noise, batch = options.noise, observation.batch_size
        if noise is None:
            drawn = self.draw(batch, generator=options.generator)["noise"]
            noise = drawn[:, 0].to(observation.device)
        candidates = noise.shape[1:-2]
        self._check_chunk("noise", noise, (batch, *candidates))
        cache, text = self.respond(observation)
        if candidates:
            cache, guidance = cache.repeat(candidates[0]), options.guidance
            repeated = None if guidance is None else guidance.repeat(candidates[0])
            options = dataclasses.replace(options, guidance=repeated)
        start = noise.flatten(0, 1) if candidates else noise
        return Response(self.denoise(cache, start, options).view(noise.shape), text)

    def respond(self, observation: Observation) -> tuple[PrefixCache, Int[Tensor, "b n"] | None]:
        """Process images and prompt, and let the samples that have to write their response text.

        Return all that the suffix needs, and the tokens of the text; None if nobody had to write.
        """
        writes = self._writes_text(observation)
        if writes is None:
            return self.prefill(observation), None
        limit, suffix = self.config.max_text_len, len(self.starts_block(observation.device))
        prefix, inputs = self._inputs(observation, limit + suffix)
        output, caches = self.vlm(*inputs)
        last = language.last_outputs(output, prefix.packing)
        written = language.write(
            *(self.vlm, last, caches, prefix.packing, limit),
            dtype=self.compute_dtype,
            ended=~writes.to(observation.device),
        )
        state, visible = observation.state, written.visible
        return self._suffix_inputs(written.caches, state, visible.shape[1], visible), written.tokens

    def _writes_text(self, observation: Observation) -> Bool[Tensor, " b"] | None:
        """Return which samples write their text themselves; None if no sample does."""
        if "text" not in self.config.targets:
            return None
        writes, given = observation.writes_text, observation.token_ar_mask
        if writes is None:
            if given is None:
                return torch.ones(observation.batch_size, dtype=torch.bool)
            writes = ~given.bool().any(1)
        return writes if bool(writes.any()) else None

    def denoise(
        self, cache: PrefixCache, noise: Float[Tensor, "b h a"], options: ActOptions
    ) -> Actions:
        """Return the actions that the noise becomes, for prefixes that were processed before."""
        num_steps = options.num_steps or 10
        condition = self.condition(1 - torch.arange(num_steps, device=noise.device) / num_steps)

        def velocity(actions: Actions, step: int) -> Actions:
            return self.velocity(actions, condition.at(step), cache)

        visit = options.visit or (lambda _: None)
        return integrate(velocity, noise, num_steps, options.guidance, visit)

    def prefill(self, observation: Observation) -> PrefixCache:
        """Run images, prompt and given text through the VLM; nothing is written.

        The cache has room for the suffix behind them.
        """
        prefix, inputs = self._inputs(observation, len(self.starts_block(observation.device)))
        return self._behind(prefix, self.vlm.prefill(*inputs), observation.state)

    def _inputs(
        self, observation: Observation, room: int = 0
    ) -> tuple[Prefix, tuple[Tokens, list[KVCache], Rope, Mask]]:
        """Return the prefix and what the VLM needs, with room for more tokens in the caches."""
        state, width = observation.state, self.config.action_dim
        if self.suffix.has_state and state.shape[1:] != (width,):
            raise ValueError(
                f"state has shape {tuple(state.shape)}, expected (batch, {width}): π0 reads a "
                "state as wide as its actions. Pad it with zeros."
            )
        prefix = self.embed_prefix(observation)
        mask = language.causal_mask(prefix.packing, observation.token_ar_mask)
        # In training later keys carry gradients and are kept in longer caches of their own.
        capacity = 0 if torch.is_grad_enabled() else prefix.packing.size + room
        return prefix, self.vlm_inputs(prefix, capacity, mask=mask)

    def _behind(
        self, prefix: Prefix, caches: list[KVCache], state: Float[Tensor, "b _"]
    ) -> PrefixCache:
        """Return what the suffix needs of a prefix: without tokens that are hidden from it."""
        packing, visible = prefix.packing, prefix.visible
        if visible is None:
            visible = masks.Lengths(packing.size, packing.lengths)
        detached = self.config.insulate and torch.is_grad_enabled()
        if detached or visible.longest < packing.size:
            caches = [cache.first(visible.longest, detached=detached) for cache in caches]
        return self._suffix_inputs(caches, state, visible.longest, visible.mask())

    def _suffix_inputs(
        self,
        caches: list[KVCache],
        state: Float[Tensor, "b _"],
        size: int,
        visible: Bool[Tensor, "b s"] | None,
    ) -> PrefixCache:
        """Return what the suffix needs, given the cached tokens that it attends to; None: all."""
        starts_block = self.starts_block(state.device)
        behind = size if visible is None else visible.sum(1)[:, None]
        steps = torch.arange(len(starts_block), device=state.device)[None]
        rope = Rope.at(behind + steps, self.config.vlm.head_dim)
        mask = None
        if visible is not None:
            mask = masks.suffix_mask(visible, starts_block)
        elif self.suffix.has_state:
            mask = masks.suffix_mask(starts_block.new_ones(1, size), starts_block)
        return PrefixCache(caches, state.float(), rope, mask)

    def starts_block(self, device: torch.device) -> Bool[Tensor, " s"]:
        """Return which suffix tokens start a block: the state, if any, and the first action."""
        before = int(self.suffix.has_state)
        return torch.arange(before + self.config.action_horizon, device=device) <= before

    def velocity(
        self, noisy_actions: Tensor, time: Tensor | Condition, cache: PrefixCache
    ) -> Float[Tensor, "b h a"]:
        """Predict the direction from the actions (time 0) to the noise (time 1).

        Instead of the time it takes `condition(time)`, computed beforehand for many times at once.
        """
        output = self.suffix_output(noisy_actions, time, cache)
        return self.suffix.action_out(output[:, -noisy_actions.shape[1] :].float())

    def condition(self, time: Float[Tensor, " k"]) -> Condition:
        vector = self.suffix.condition(time.float())
        return Condition(vector, self.action_expert.modulate(vector.to(self.compute_dtype)))

    def prefix_output(self, observation: Observation) -> Float[Tensor, "b t d"]:
        """Return the VLM's output per token of the padded prefix; only for verification."""
        prefix, inputs = self._inputs(observation)
        return prefix.packing.unpack(self.vlm(*inputs)[0])

    def suffix_output(
        self, noisy_actions: Tensor, time: Tensor | Condition, cache: PrefixCache
    ) -> Float[Tensor, "b s d"]:
        """Return the action expert's output for every suffix token."""
        batch = len(cache.state)
        self._check_chunk("noisy_actions", noisy_actions, (batch,))
        if not isinstance(time, Condition) and time.shape not in ((batch,), (1,)):
            raise ValueError(
                f"time has shape {tuple(time.shape)}, expected one number per sample: ({batch},)."
            )
        condition = time if isinstance(time, Condition) else self.condition(time)
        tokens = self.suffix.tokens(cache.state, noisy_actions.float(), condition.vector)
        tokens = tokens.to(self.compute_dtype)
        parts = (cache.caches, cache.rope, cache.mask, condition.modulations)
        return self.action_expert(tokens, *parts)[0]

    def unused_parameters(self) -> list[str]:
        """Return the names of the tail of the VLM's last layer, which no action depends on.

        A model that writes tokens uses all of them.
        """
        if self.config.targets:
            return []
        last = f"vlm.layers.{self.config.vlm.depth - 1}."
        tail = (
            *(last + part for part in ("attention.query", "attention.output", "mlp_norm", "mlp")),
            "vlm.norm",
        )
        return [name for name, _ in self.named_parameters() if name.startswith(tail)]

    def token_groups(self) -> list[TokenGroup]:
        groups = super().token_groups()
        if "text" in self.config.targets:
            source = "prefix, written by the model or given"
            groups.append(TokenGroup("text", self.config.max_text_len, source, True, True))
        if self.suffix.has_state:
            groups.append(TokenGroup("state", 1, "suffix", starts_block=True))
        horizon, source = self.config.action_horizon, "suffix, one per step of the chunk"
        return [*groups, TokenGroup("actions", horizon, source, starts_block=True)]

    def _check_chunk(self, name: str, value: Tensor, rows: tuple[int, ...]) -> None:
        expected = (*rows, self.config.action_horizon, self.config.action_dim)
        if value.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, expected {expected}: batch, "
                "action_horizon, action_dim."
            )


def sample_time(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Draw 0.001 + 0.999 · Beta(1.5, 1): more often noisy than clean, never quite clean."""
    return 0.001 + 0.999 * torch.rand(shape, generator=generator) ** (1 / 1.5)

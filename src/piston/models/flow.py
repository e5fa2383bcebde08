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
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from piston.models import language, masks
from piston.models.configs import Pi0Config
from piston.models.gemma import Expert, KVCache, Mask, Modulation, Rope, Tokens
from piston.models.integrator import Committed, integrate
from piston.models.masks import TokenGroup
from piston.models.model import ActOptions, Model, Prefix, Response
from piston.models.precision import additive_mask
from piston.models.suffix import AdaptiveSuffix, TokenSuffix
from piston.observation import Actions, Observation

# Of the loss that distils large steps: its weight, the bound of what it is compared with, and how
# many ordinary steps of a chunk lead there.
_SHORTCUT_WEIGHT = 1.0
_MAX_SHORTCUT = 20.0
_ORDINARY_STEPS = 10


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
    """All that depends on time alone, for one time per row, or one per row and action."""

    vector: Float[Tensor, "k _ d"]
    modulations: list[Modulation]

    def at(self, row: int) -> Condition:
        """Return one time, which a whole batch can share."""
        return self._map(lambda part: part[row : row + 1])

    def replaced(self, other: Condition, where: Bool[Tensor, "b h"]) -> Condition:
        """Return a condition per action: that of `other` for the actions that are named."""
        return self._map(lambda ours, theirs: torch.where(where[..., None], theirs, ours), other)

    def _map(self, change: Callable[..., Tensor], *others: Condition) -> Condition:
        """Apply a function to every tensor, and to those of other conditions in its place."""
        modulations = [
            Modulation(*map(change, *same))
            for same in zip(self.modulations, *(other.modulations for other in others))
        ]
        return Condition(change(self.vector, *(other.vector for other in others)), modulations)


class Pi0(Model):
    """A flow model; `config.pi05` chooses the suffix and the action expert's norms, here only.

    Actions, noise and times are annotated as plain tensors where a method checks their shapes.
    """

    config: Pi0Config

    def __init__(self, config: Pi0Config) -> None:
        super().__init__(config)
        self.action_expert = Expert(config.action_expert, adaptive=config.pi05)
        self.suffix = (AdaptiveSuffix if config.pi05 else TokenSuffix)(config)

    def draw(
        self, batch_size: int, num_draws: int = 1, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draw `noise` (b, n, h, a), `time` (b, n) and, with `max_delay`, `delay` (b, n)."""
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1, is {num_draws}.")
        shape = (batch_size, num_draws)
        chunk = (self.config.action_horizon, self.config.action_dim)
        drawn = {
            "noise": torch.randn(*shape, *chunk, generator=generator),
            "time": sample_time(shape, generator),
        }
        if longest := self.config.max_delay:
            drawn["delay"] = torch.randint(longest + 1, shape, generator=generator)
        return drawn

    def training_losses(
        self, observation: Observation, actions: Tensor | None, draws: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return `velocity`: the squared error of every number of the velocity.

        Of a model with targets also `tokens`: the weighted cross-entropy of what it has to write.
        Of a model that is being distilled also `shortcut`, which the second half of the draws is
        for.
        """
        if actions is None:
            raise ValueError(f"The loss of {self.config.family} needs actions; there are none.")
        losses: dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]] = {}
        # What is distilled is denoising; the VLM is frozen then.
        if self.config.targets and self.config.distilled_steps is None:
            prefix, inputs = self._inputs(observation)
            output, caches = self.vlm(*inputs)
            loss = language.next_token_loss(self.vlm, output, prefix.packing, observation)
            losses["tokens"] = self.config.token_loss_weight * loss
            cache = self._behind(prefix, caches, observation.state)
        else:
            cache = self.prefill(observation)
        if self.config.distilled_steps is not None and draws["time"].shape[1] > 1:
            halves = {name: values.chunk(2, dim=1) for name, values in draws.items()}
            draws, others = ({name: part[i] for name, part in halves.items()} for i in (0, 1))
            error = self.shortcut_error(cache, actions, **others)
            losses["shortcut"] = _SHORTCUT_WEIGHT * error.mean(1)
        error = self.velocity_error(cache, actions, **draws)
        return {"velocity": error.mean(1), **losses}

    @property
    def loss_names(self) -> tuple[str, ...]:
        if self.config.distilled_steps is not None:
            return ("velocity", "shortcut")
        return ("velocity", "tokens") if self.config.targets else ("velocity",)

    def loss_weights(
        self, batch: Mapping[str, Any], action_weights: Float[Tensor, "b h a"]
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        return {
            name: language.token_loss_weights(batch) if name == "tokens" else action_weights
            for name in self.loss_names
        }

    def velocity_error(
        self,
        cache: PrefixCache,
        actions: Tensor,
        noise: Tensor,
        time: Tensor,
        delay: Tensor | None = None,
    ) -> Float[Tensor, "b n h a"]:
        """Return the squared error of the velocity for several draws that share one prefix.

        `noise` has shape (b, n, h, a), `time` (b, n). With `delay` (b, n) the first actions of
        each draw are clean, at time 0, and have no part in the error.
        """
        noisy, cache, clean = self._noisy(cache, actions, noise, time, delay)
        velocity = self.velocity(noisy, self._condition(time.flatten(), clean), cache)
        target = (noise - actions[:, None]).flatten(0, 1)
        return self._squared_error(velocity, target, clean).view(noise.shape)

    def shortcut_error(
        self,
        cache: PrefixCache,
        actions: Tensor,
        noise: Tensor,
        time: Tensor,
        delay: Tensor | None = None,
    ) -> Float[Tensor, "b n h a"]:
        """Return the squared error of one large step, against where ordinary small ones lead.

        The large steps are those of a chunk that is denoised in `distilled_steps`; each draw takes
        the one that its time belongs to. The small steps are the model's own.
        """
        num_steps = self.config.distilled_steps or 1
        start, size = (time * num_steps).ceil() / num_steps, 1 / num_steps
        noisy, cache, clean = self._noisy(cache, actions, noise, start, delay)
        begin, parts = start.flatten(), math.ceil(_ORDINARY_STEPS / num_steps)

        def small_step(actions: Actions, step: int) -> Actions:
            return size * self.velocity(
                actions, self._condition(begin - size * step / parts, clean), cache
            )

        end = integrate(small_step, noisy, parts, committed=clean)[-1]
        target = ((noisy - end) / size).clamp(-_MAX_SHORTCUT, _MAX_SHORTCUT)
        velocity = self.velocity(noisy, self._condition(begin, clean, begin - size), cache)
        return self._squared_error(velocity, target, clean).view(noise.shape)

    def _noisy(
        self, cache: PrefixCache, actions: Tensor, noise: Tensor, time: Tensor, delay: Tensor | None
    ) -> tuple[Actions, PrefixCache, Committed | None]:
        """Return the noisy actions of all draws as rows, a cache with as many rows, and what is
        clean of them.
        """
        batch = len(cache.state)
        self._check_chunk("actions", actions, (batch,))
        self._check_chunk("noise", noise, (batch, *noise.shape[1:2]))
        if time.shape != noise.shape[:2]:
            raise ValueError(
                f"time has shape {tuple(time.shape)}, expected one number per draw of noise: "
                f"{tuple(noise.shape[:2])}."
            )
        t, num_draws = time[:, :, None, None], time.shape[1]
        noisy = (t * noise + (1 - t) * actions[:, None]).flatten(0, 1)
        if num_draws > 1:
            cache = cache.repeat(num_draws)
        if delay is None:
            return noisy, cache, None
        steps = torch.arange(self.config.action_horizon, device=delay.device)
        is_clean = steps < delay.flatten()[:, None]
        clean = Committed(actions.repeat_interleave(num_draws, 0), is_clean)
        return clean.keep(noisy), cache, clean

    def _condition(
        self,
        time: Float[Tensor, " b"],
        clean: Committed | None,
        target: Float[Tensor, " b"] | None = None,
    ) -> Condition:
        """Return the condition of each row's time, and of time 0 for clean actions."""
        condition = self.condition(time, target)
        if clean is None:
            return condition
        return condition.replaced(self.condition(time.new_zeros(1)), clean.steps)

    def _squared_error(
        self, velocity: Actions, target: Actions, clean: Committed | None
    ) -> Float[Tensor, "b h a"]:
        """Return the squared error, 0 for clean actions; the others make up for those on average.

        The number of clean actions is uniform from 0 to `max_delay`.
        """
        error = (velocity - target).square()
        if clean is None:
            return error
        horizon = self.config.action_horizon
        share = 1 - self.config.max_delay / 2 / horizon
        return error.masked_fill(clean.steps[..., None], 0) / share

    def act_with(self, observation: Observation, options: ActOptions) -> Response:
        """Write the response text, if the model has one, and integrate from noise to actions.

        There are `config.num_steps` by default.
        """
        if options.visit is not None:
            raise ValueError(f"{self.config.family} decodes no tokens: it can use no visit.")
        if options.committed is not None and not self.config.max_delay:
            raise ValueError(
                f"This {self.config.family} was trained without --max-delay, so it cannot continue "
                "committed actions. Use guidance."
            )
        noise, batch = options.noise, observation.batch_size
        if noise is None:
            drawn = self.draw(batch, generator=options.generator)["noise"]
            noise = drawn[:, 0].to(observation.device)
        candidates = noise.shape[1:-2]
        self._check_chunk("noise", noise, (batch, *candidates))
        cache, text = self.respond(observation)
        if candidates:
            cache, times = cache.repeat(candidates[0]), candidates[0]
            repeated: dict[str, Any] = {
                name: None if one is None else one.repeat(times)
                for name, one in (("guidance", options.guidance), ("committed", options.committed))
            }
            options = dataclasses.replace(options, **repeated)
        start = noise.flatten(0, 1) if candidates else noise
        path = self.denoise(cache, start, options).unflatten(1, noise.shape[:-2])
        return Response(path[-1], text, path)

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
        return self.suffix_inputs(written.caches, state, visible.shape[1], visible), written.tokens

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
    ) -> Float[Tensor, "k b h a"]:
        """Return how the noise becomes actions, for prefixes that were processed before.

        The first is the noise, the last are the actions.
        """
        num_steps, committed = options.num_steps or self.config.num_steps, options.committed
        times = 1 - torch.arange(num_steps, device=noise.device) / num_steps
        # A distilled model learned steps of one size; all others are ordinary ones.
        is_shortcut = num_steps == self.config.distilled_steps
        condition = self.condition(times, times - 1 / num_steps if is_shortcut else None)
        clean = None if committed is None else self.condition(times.new_zeros(1))

        def velocity(actions: Actions, step: int) -> Actions:
            now = condition.at(step)
            if committed is not None and clean is not None:
                now = now.replaced(clean, committed.steps)
            return self.velocity(actions, now, cache)

        return integrate(velocity, noise, num_steps, options.guidance, committed)

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
        return self.suffix_inputs(caches, state, visible.longest, visible.mask())

    def suffix_inputs(
        self,
        caches: list[KVCache],
        state: Float[Tensor, "b _"],
        size: int,
        visible: Bool[Tensor, "b s"] | None,
    ) -> PrefixCache:
        """Return what the suffix needs, given the cached tokens that it attends to; None: all."""
        starts_block = self.starts_block(state.device)
        end = size if visible is None else visible.sum(1)[:, None]
        steps = torch.arange(len(starts_block), device=state.device)[None]
        rope = Rope.at(end + steps, self.config.vlm.head_dim)
        mask = None
        if visible is not None:
            mask = masks.suffix_mask(visible, starts_block)
        elif self.suffix.has_state:
            mask = masks.suffix_mask(starts_block.new_ones(1, size), starts_block)
        mask = additive_mask(mask, self.compute_dtype)
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

    def condition(
        self, time: Float[Tensor, " k"], target: Float[Tensor, " k"] | None = None
    ) -> Condition:
        """Return all that depends on times alone; of a distilled model, also on target times."""
        vector = self.suffix.condition(time.float(), target)
        modulations = self.action_expert.modulate(vector.to(self.compute_dtype))
        return Condition(vector[:, None], modulations)

    def prefix_output(self, observation: Observation) -> Float[Tensor, "b t d"]:
        """Return the VLM's output per token of the padded prefix; only for verification."""
        prefix, inputs = self._inputs(observation)
        return prefix.packing.unpack(self.vlm(*inputs)[0])

    def suffix_output(
        self, noisy_actions: Tensor, time: Tensor | Condition, cache: PrefixCache
    ) -> Float[Tensor, "b s d"]:
        """Return the action expert's output for every suffix token."""
        batch = cache.state.shape[0]
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

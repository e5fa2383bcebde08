"""A Gemma expert: norms, rotary positions, attention through a KV cache, MLP, stacked in layers.

Several experts share one attention: each processes its own tokens with its own weights, and in
every layer its queries attend to the keys and values of all tokens before them, of any expert.

    layer   VLM weights                      action expert weights
      0     prefix ──► keys, values ─┬─────► suffix attends to both
      1     prefix ──► keys, values ─┼─────► suffix attends to both
      …                              │
     last   keys, values only ───────┘       suffix attends to both ──► norm ──► output

The tokens of an expert never attend to those of a later expert, so the experts run one after the
other and the result equals one attention over the concatenation. Experts may differ in width; they
agree in depth and heads. Which tokens attend to which is given as a mask (see `masks`).

Dims: b batch, t tokens, d width, n heads, k key heads, e head dim, s tokens in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piston.models import precision
from piston.models.configs import GemmaSize
from piston.models.layers import compiled_once
from piston.models.lora import make_linear

_EPSILON = 1e-6
_WAVELENGTH = 10_000.0

Tokens = Float[Tensor, "b t d"]
# Which of the cached tokens (columns) each new token (row) attends to, or what is added to the
# logits for it; None: all of them.
Mask = Bool[Tensor, "#b #t s"] | Float[Tensor, "#b #t s"] | None


class Modulation(NamedTuple):
    """What a condition makes of an adaptive norm, for all tokens or for each."""

    # In float32; the scale includes its 1.
    scale: Float[Tensor, "#b #t d"]
    shift: Float[Tensor, "#b #t d"]
    # Multiplies what the branch after the norm adds to the residual stream.
    gate: Float[Tensor, "#b #t d"]


class Rope(NamedTuple):
    """Rotary angles of a sequence of tokens, computed once for all layers.

    The sines of the first half of the channels are negative.
    """

    cos: Float[Tensor, "#b t 1 e"]
    sin: Float[Tensor, "#b t 1 e"]

    @classmethod
    def at(cls, positions: Int[Tensor, "b t"], head_dim: int) -> Rope:
        exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
        angles = positions[:, :, None, None] / _WAVELENGTH**exponents
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def rotate(self, x: Float[Tensor, "b t n e"]) -> Float[Tensor, "b t n e"]:
        """Rotate channel i against channel i + e/2, in float32."""
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        if x.requires_grad:
            return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)
        return torch.addcmul(x * self.cos, swapped, self.sin, out=torch.empty_like(x))


@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens that one layer has processed so far.

    With room left, new ones are written in place behind the old and nothing is copied; extending
    the same cache again overwrites them. Without room, or where gradients flow, `extend` allocates
    a longer cache.
    """

    keys: Float[Tensor, "b k capacity e"]
    values: Float[Tensor, "b k capacity e"]
    length: int

    @property
    def has_room(self) -> bool:
        """Whether new keys and values may be written in place."""
        return self.length < self.keys.shape[2]

    def extend(self, keys: Float[Tensor, "b t k e"], values: Float[Tensor, "b t k e"]) -> KVCache:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2] or keys.requires_grad or self.keys.requires_grad:
            if self.length:
                old_keys, old_values = self.read()
                keys, values = torch.cat((old_keys, keys), 2), torch.cat((old_values, values), 2)
            return KVCache(keys, values, end)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        return KVCache(self.keys, self.values, end)

    def read(self) -> tuple[Float[Tensor, "b k s e"], Float[Tensor, "b k s e"]]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def first(self, length: int, *, detached: bool = False) -> KVCache:
        """Return a cache of the first tokens, without room; `detached` stops gradients to them."""
        keys, values = (part[:, :, :length] for part in (self.keys, self.values))
        if detached:
            keys, values = keys.detach(), values.detach()
        return KVCache(keys, values, length)

    def repeat(self, times: int) -> KVCache:
        """Return a cache of every sample repeated `times` in a row, with the same room."""
        keys, values = (part.repeat_interleave(times, 0) for part in (self.keys, self.values))
        return KVCache(keys, values, self.length)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; the scale is stored as its difference from 1."""

    # 1 + scale, computed once for a model that is only used for inference.
    factor: Float[Tensor, " d"] | None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width))
        self.register_buffer("factor", None, persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    @torch.no_grad()
    def join(self) -> None:
        """Compute once what depends on the parameter alone."""
        self.factor = 1 + self.scale

    def forward(self, x: Tokens, modulation: Modulation | None = None) -> Tokens:  # noqa: ARG002
        factor = 1 + self.scale if self.factor is None else self.factor
        return nn.functional.rms_norm(x.float(), x.shape[-1:], factor, _EPSILON).to(x.dtype)


class ZeroLinear(precision.Linear):
    """A linear map that starts as zero."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # draws as many random numbers as any other linear map
        nn.init.zeros_(self.weight)


class AdaptiveRMSNorm(nn.Module):
    """RMSNorm whose scale, shift and gate of the branch that follows depend on a condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = ZeroLinear(width, 3 * width)

    def modulate(self, condition: Float[Tensor, "b d"]) -> Modulation:
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        # A copy in float32, too: a layer that is compiled once takes no two views of one tensor.
        return Modulation(1 + scale.float(), shift.to(torch.float32, copy=True), gate)

    def forward(self, x: Tokens, modulation: Modulation | None) -> Tokens:
        assert modulation is not None
        normed = nn.functional.rms_norm(x.float(), x.shape[-1:], None, _EPSILON)
        return torch.addcmul(modulation.shift, normed, modulation.scale).to(x.dtype)


class Attention(nn.Module):
    """Queries, keys and values of one expert; the attention itself may span several experts.

    For inference the three matrices may be joined into one, which takes their place.
    """

    def __init__(self, size: GemmaSize) -> None:
        super().__init__()
        self.size = size
        self.joined: precision.Linear | None = None
        lora = size.lora if size.lora and size.lora.attention else None
        inner, inner_kv = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        self.query = make_linear(size.width, inner, lora, groups=size.num_heads)
        self.key = make_linear(size.width, inner_kv, lora, groups=size.num_kv_heads)
        self.value = make_linear(size.width, inner_kv, lora, groups=size.num_kv_heads)
        self.output = make_linear(inner, size.width, lora)

    def join(self) -> None:
        """Join the matrices into one, unless they have adapters."""
        self.joined = precision.join(self, ("query", "key", "value"))

    def project(
        self, x: Tokens, rope: Rope
    ) -> tuple[Float[Tensor, "b t n e"], Float[Tensor, "b t k e"], Float[Tensor, "b t k e"]]:
        """Return rotated queries, rotated keys, and values."""
        if self.joined is None:
            return rope.rotate(self._heads(self.query(x))), *self._keys_and_values(x, rope)
        num_keys = self.size.num_kv_heads
        heads = self._heads(self.joined(x))
        rotated, values = rope.rotate(heads[:, :, :-num_keys]), heads[:, :, -num_keys:]
        return rotated[:, :, :-num_keys], rotated[:, :, -num_keys:], values

    def extend(self, x: Tokens, rope: Rope, cache: KVCache) -> KVCache:
        """Add the keys and values of these tokens to the cache."""
        if self.joined is None:
            return cache.extend(*self._keys_and_values(x, rope))
        return cache.extend(*self.project(x, rope)[1:])

    def _keys_and_values(self, x: Tokens, rope: Rope) -> tuple[Tensor, Tensor]:
        return rope.rotate(self._heads(self.key(x))), self._heads(self.value(x))

    def _heads(self, x: Float[Tensor, "b t ne"]) -> Float[Tensor, "b t n e"]:
        return x.unflatten(-1, (-1, self.size.head_dim))

    def forward(
        self, x: Tokens, rope: Rope, cache: KVCache, mask: Mask
    ) -> tuple[Float[Tensor, "b t ne"], KVCache]:
        """Return the mixed values of all heads, before the output matrix, and the longer cache."""
        queries, keys, values = self.project(x, rope)
        cache = cache.extend(keys, values)
        # Unlike with enable_gqa, every kernel accepts a mask this way. A single key head is shared
        # as a view; several are repeated in memory.
        group = self.size.num_heads // self.size.num_kv_heads
        keys, values = (
            part[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for part in cache.read()
        )
        mask = None if mask is None else mask[:, None]
        mixed = precision.attention(queries.transpose(1, 2), keys, values, mask)
        return mixed.transpose(1, 2).flatten(2), cache


class MLP(nn.Module):
    def __init__(self, size: GemmaSize) -> None:
        super().__init__()
        self.joined: precision.Linear | None = None
        lora = size.lora if size.lora and size.lora.mlp else None
        self.gate = make_linear(size.width, size.mlp_dim, lora)
        self.up = make_linear(size.width, size.mlp_dim, lora)
        self.down = make_linear(size.mlp_dim, size.width, lora)

    def join(self) -> None:
        """Join gate and up into one matrix, unless they have adapters."""
        self.joined = precision.join(self, ("gate", "up"))

    def forward(self, x: Tokens) -> Float[Tensor, "b t m"]:
        """Return the hidden numbers, before the matrix that leads down again."""
        if self.joined is None:
            return self.up.times(x, self.gate.gelu(x))
        gate, up = self.joined(x).chunk(2, dim=-1)
        return nn.functional.gelu(gate, approximate="tanh") * up


class ExpertLayer(nn.Module):
    def __init__(self, size: GemmaSize, adaptive: bool) -> None:
        super().__init__()
        norm = AdaptiveRMSNorm if adaptive else RMSNorm
        self.attention_norm = norm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = norm(size.width)
        self.mlp = MLP(size)

    def prefill(self, x: Tokens, cache: KVCache, rope: Rope) -> KVCache:
        """Compute keys and values only: all that later tokens need of a prefix's last layer."""
        return self.attention.extend(self.attention_norm(x), rope, cache)

    def forward(
        self,
        x: Tokens,
        cache: KVCache,
        rope: Rope,
        mask: Mask,
        attention_modulation: Modulation | None,
        mlp_modulation: Modulation | None,
    ) -> tuple[Tokens, KVCache]:
        normed = self.attention_norm(x, attention_modulation)
        mixed, cache = self.attention(normed, rope, cache, mask)
        x = _add_branch(x, self.attention.output, mixed, attention_modulation)
        hidden = self.mlp(self.mlp_norm(x, mlp_modulation))
        return _add_branch(x, self.mlp.down, hidden, mlp_modulation), cache


def _add_branch(
    x: Tokens, linear: nn.Module, branch: Tensor, modulation: Modulation | None
) -> Tokens:
    """Add the last matrix of a branch, times its gate, to the residual stream."""
    if modulation is None:
        return linear(branch, x)
    return torch.addcmul(x, linear(branch), modulation.gate)


class TokenEmbedding(nn.Embedding):
    """An embedding table whose rows start with a norm of about one."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # keeps the random sequence of a seed
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class Expert(nn.Module):
    """A stack of layers, with an embedding table if the expert reads words."""

    def __init__(
        self, size: GemmaSize, *, adaptive: bool = False, vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.gradient_checkpointing = False
        if vocab_size is not None:
            self.embedding = TokenEmbedding(vocab_size, size.width)
        layers = nn.ModuleList(ExpertLayer(size, adaptive) for _ in range(size.depth))
        self.layers: Sequence[ExpertLayer] = layers  # type: ignore[assignment]
        self.norm = (AdaptiveRMSNorm if adaptive else RMSNorm)(size.width)

    def embed(self, token_ids: Int[Tensor, "*b"], dtype: torch.dtype) -> Float[Tensor, "*b d"]:
        return (self.embedding(token_ids).float() * self.size.width**0.5).to(dtype)

    def modulate(self, condition: Float[Tensor, "b d"]) -> list[Modulation]:
        """Return the modulation of every adaptive norm: two per layer, then the last norm."""
        norms = (n for layer in self.layers for n in (layer.attention_norm, layer.mlp_norm))
        adaptive = (n for n in (*norms, self.norm) if isinstance(n, AdaptiveRMSNorm))
        return [norm.modulate(condition) for norm in adaptive]

    def empty_caches(self, batch: int, capacity: int, like: Tensor) -> list[KVCache]:
        """Return one cache per layer with room for `capacity` tokens, in the dtype of `like`."""
        shape = (batch, self.size.num_kv_heads, capacity, self.size.head_dim)
        return [KVCache(like.new_empty(shape), like.new_empty(shape), 0) for _ in self.layers]

    def forward(
        self,
        tokens: Tokens,
        caches: Sequence[KVCache],
        rope: Rope,
        mask: Mask = None,
        modulations: Sequence[Modulation | None] | None = None,
    ) -> tuple[Tokens, list[KVCache]]:
        """Return the output of the last norm, and the caches extended by these tokens."""
        modulations = modulations or [None] * (2 * len(self.layers) + 1)
        mask = precision.additive_mask(mask, tokens.dtype)
        extended = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches)):
            pair = modulations[2 * index : 2 * index + 2]
            tokens, cache = self._run(layer, tokens, cache, rope, mask, *pair)
            extended.append(cache)
        return self.norm(tokens, modulations[-1]), extended

    def prefill(
        self, tokens: Tokens, caches: Sequence[KVCache], rope: Rope, mask: Mask = None
    ) -> list[KVCache]:
        """Return the caches as `forward` does, without the work that only its output needs."""
        mask = precision.additive_mask(mask, tokens.dtype)
        extended = []
        for layer, cache in zip(self.layers[:-1], caches):
            tokens, cache = self._run(layer, tokens, cache, rope, mask, None, None)
            extended.append(cache)
        return [*extended, self.layers[-1].prefill(tokens, caches[-1], rope)]

    def _run(
        self,
        layer: ExpertLayer,
        tokens: Tokens,
        cache: KVCache,
        rope: Rope,
        mask: Mask,
        *modulations: Modulation | None,
    ) -> tuple[Tokens, KVCache]:
        if self.gradient_checkpointing:
            others: Any = (mask, *modulations)
            return checkpoint(layer, tokens, cache, rope, *others, use_reentrant=False)
        if cache.has_room:  # and is written in place
            return layer(tokens, cache, rope, mask, *modulations)
        parts = [part for modulation in modulations for part in modulation or ()]
        tokens, keys, values = _run_on_tensors(
            layer, tokens, cache.keys, cache.values, *rope, mask, *parts
        )
        return tokens, KVCache(keys, values, keys.shape[2])


@compiled_once
def _run_on_tensors(
    layer: ExpertLayer,
    tokens: Tokens,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Mask,
    *parts: Tensor,
) -> tuple[Tokens, Tensor, Tensor]:
    """Run a layer after a cache without room; `parts` are those of two modulations, or none."""
    cache = KVCache(keys, values, keys.shape[2])
    pair = (Modulation(*parts[:3]), Modulation(*parts[3:])) if parts else (None, None)
    tokens, cache = layer(tokens, cache, Rope(cos, sin), mask, *pair)
    return tokens, cache.keys, cache.values

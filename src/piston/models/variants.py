"""Sizes: every number that says how large a part of a model is, and the names they go by.

On the command line a size is its name (`gemma_2b`) or its numbers
(`width=512,depth=8,mlp_dim=2048,num_heads=8,num_kv_heads=1,head_dim=64,lora_rank=16`;
`lora_attention=0` or `lora_mlp=0` leave out a kind of layer).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from piston.serialization import register


def _require_positive(size: object, but: Sequence[str] = ()) -> None:
    for field in dataclasses.fields(size):  # type: ignore[arg-type]
        value = getattr(size, field.name)
        if field.name == "lora":
            continue
        if type(value) is not int or (value < 1 and field.name not in but):
            raise ValueError(
                f"{type(size).__name__}.{field.name} must be a whole number of at least 1, is "
                f"{value!r}."
            )


@register("lora")
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: each adapted product gains `alpha / rank · x A B`."""

    rank: int
    alpha: float
    # Which kinds of layers are adapted.
    attention: bool = True
    mlp: bool = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"The rank of adapters must be at least 1, is {self.rank}.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"The alpha of adapters must be a positive number, is {self.alpha}.")
        if not (self.attention or self.mlp):
            raise ValueError(
                "Adapters must adapt attention, mlp or both; for neither, give no adapters at all."
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@register("gemma_size")
@dataclasses.dataclass(frozen=True)
class GemmaSize:
    """One expert of the joint transformer."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads}): every group of query heads shares one key head."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, found {self.head_dim}.")


@register("vision_size")
@dataclasses.dataclass(frozen=True)
class VisionSize:
    """The vision tower: a ViT over square patches.

    Small models learn faster from a convolutional stem: with `stem` channels after its first layer
    and twice as many after each further one, every layer halving the image until a patch is one
    pixel. The transformer behind it may then have no layer at all.
    """

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch: int
    stem: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, but=("stem", "depth") if self.stem > 0 else ("stem",))
        if self.stem < 0 or self.depth < 0 or (self.stem and self.patch & (self.patch - 1)):
            raise ValueError(
                f"A stem of {self.stem} channels halves the image until a patch of {self.patch} is "
                "one pixel: channels and depth must not be negative, the patch a power of two."
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"Vision width ({self.width}) must be a multiple of num_heads ({self.num_heads})."
            )


VISION: dict[str, VisionSize] = {
    "so400m": VisionSize(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch=14),
    "dummy": VisionSize(width=64, depth=2, mlp_dim=128, num_heads=4, patch=28),
}

_GEMMA_2B = GemmaSize(
    width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256
)
_GEMMA_300M = dataclasses.replace(_GEMMA_2B, width=1024, mlp_dim=4096)

GEMMA: dict[str, GemmaSize] = {
    "gemma_2b": _GEMMA_2B,
    "gemma_2b_lora": dataclasses.replace(_GEMMA_2B, lora=LoRA(rank=16, alpha=16.0)),
    "gemma_300m": _GEMMA_300M,
    "gemma_300m_lora": dataclasses.replace(_GEMMA_300M, lora=LoRA(rank=32, alpha=32.0)),
    "dummy": GemmaSize(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
}


_LORA_KINDS = ("attention", "mlp")


def size_name(size: GemmaSize | VisionSize) -> str:
    """The name of a known size, else its numbers in the form that `parse_*_size` reads."""
    table: Mapping[str, GemmaSize | VisionSize] = GEMMA if isinstance(size, GemmaSize) else VISION
    for name, known in table.items():
        if known == size:
            return name
    numbers = {field.name: getattr(size, field.name) for field in dataclasses.fields(size)}
    lora = numbers.pop("lora", None)
    if lora is not None:
        numbers |= {"lora_rank": lora.rank, "lora_alpha": lora.alpha}
        numbers |= {f"lora_{kind}": 0 for kind in _LORA_KINDS if not getattr(lora, kind)}
    return ",".join(f"{name}={number}" for name, number in numbers.items())


def parse_gemma_size(text: str) -> GemmaSize:
    if text in GEMMA:
        return GEMMA[text]
    numbers = _parse_numbers(
        text, {f.name for f in dataclasses.fields(GemmaSize)} - {"lora"}, GEMMA
    )
    adapters = {n: numbers.pop(n) for n in tuple(numbers) if n.startswith("lora_")}
    if adapters and "lora_rank" not in adapters:
        raise ValueError(f"Size {text!r} has {', '.join(adapters)} but no lora_rank.")
    lora = None
    if adapters:
        rank = _whole("lora_rank", adapters["lora_rank"])
        kinds = {kind: _switch(f"lora_{kind}", adapters) for kind in _LORA_KINDS}
        lora = LoRA(rank, adapters.get("lora_alpha", float(rank)), **kinds)
    return GemmaSize(**{n: _whole(n, number) for n, number in numbers.items()}, lora=lora)


def parse_vision_size(text: str) -> VisionSize:
    if text in VISION:
        return VISION[text]
    names = {field.name for field in dataclasses.fields(VisionSize)} - {"stem"}
    numbers = _parse_numbers(text, names, VISION)
    return VisionSize(**{name: _whole(name, number) for name, number in numbers.items()})


def _whole(name: str, number: float) -> int:
    if not number.is_integer():  # neither is infinity
        raise ValueError(f"{name} must be a whole number, is {number:g}.")
    return int(number)


def _switch(name: str, numbers: Mapping[str, float]) -> bool:
    number = numbers.get(name, 1.0)
    if number not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, is {number:g}.")
    return bool(number)


def _parse_numbers(text: str, required: set[str], known: Mapping[str, object]) -> dict[str, float]:
    lora = {"lora_rank", "lora_alpha", *(f"lora_{kind}" for kind in _LORA_KINDS)}
    optional = lora if known is GEMMA else {"stem"}
    try:
        pairs = [(name, float(number)) for name, number in (p.split("=") for p in text.split(","))]
    except ValueError:
        pairs = []
    numbers = dict(pairs)
    if len(numbers) < len(pairs):
        raise ValueError(f"Size {text!r} gives a name twice.")
    if not required <= numbers.keys() <= required | optional:
        raise ValueError(
            f"Unknown size {text!r}. Known: {', '.join(known)}; or give all of "
            + ",".join(f"{name}=N" for name in sorted(required))
        )
    return numbers

"""The configurations of π0, π0.5 and π0-FAST, and the sizes of their parts.

No tensors, so that listing presets needs no torch. On the command line a size is its name
(`gemma_2b`); any other one is given in Python, by a preset.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

import tyro

from piston.serialization import register
from piston.tokenizers.fast import PUBLIC_FAST

Dtype = Literal["float32", "bfloat16"]
TokenizerName = Literal["paligemma", "bytes"]
Target = Literal["text", "fast"]

_FLOW_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_FAST_CAMERAS = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")

# No count of a model is larger, so that a damaged file is not taken for an enormous model.
_MAX_COUNT = 2**20
_MAX_DEPTH = 1000


def _require_positive(size: object, but: Sequence[str] = ()) -> None:
    for name, value in vars(size).items():
        if name == "lora":
            continue
        least, most = name not in but, _MAX_DEPTH if name == "depth" else _MAX_COUNT
        if type(value) is not int or (least and value < 1) or value > most:
            raise ValueError(
                f"{type(size).__name__}.{name} must be a whole number of at least 1 and at most "
                f"{most}, is {reprlib.repr(value)}."
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
        if type(self.rank) is not int or not 1 <= self.rank <= _MAX_COUNT:
            found = reprlib.repr(self.rank)
            raise ValueError(
                f"The rank of adapters must be at least 1 and at most {_MAX_COUNT}, is {found}."
            )
        if not 0 < self.alpha <= _MAX_COUNT:
            found = reprlib.repr(self.alpha)
            raise ValueError(
                f"The alpha of adapters must be a positive number up to {_MAX_COUNT}, is {found}."
            )
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


Size = TypeVar("Size", GemmaSize, VisionSize)


def size_name(size: GemmaSize | VisionSize) -> str:
    """Return the name of a known size, else its numbers."""
    for name, known in (*GEMMA.items(), *VISION.items()):
        if known == size:  # sizes of different classes are never equal
            return name
    numbers = dataclasses.asdict(size)
    for name, number in (numbers.pop("lora", None) or {}).items():
        if number is not True:  # switches are on by default
            numbers[f"lora_{name}"] = int(number) if number is False else number
    return ",".join(f"{name}={number}" for name, number in numbers.items())


def _parse_size(known: Mapping[str, Size], text: str) -> Size:
    """Return a known size by its name."""
    if text not in known:
        raise ValueError(
            f"Unknown size {text!r}. Known: {', '.join(known)}. Any other size is given in Python, "
            "by a preset in a file that PISTON_PRESETS names."
        )
    return known[text]


parse_gemma_size = functools.partial(_parse_size, GEMMA)
parse_vision_size = functools.partial(_parse_size, VISION)


def _named(parse: Callable[[str], Size]) -> tyro.constructors.PrimitiveConstructorSpec:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, GemmaSize | VisionSize),
        str_from_instance=lambda size: [size_name(size)],
    )


NamedGemmaSize = Annotated[GemmaSize, _named(parse_gemma_size)]
NamedVisionSize = Annotated[VisionSize, _named(parse_vision_size)]


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """What every model has. Its families are π0 / π0.5 and π0-FAST.

    A preset chooses what pretrained weights fix; such fields (`Suppress`) are no options.
    """

    # Numbers per action; the robot's are padded with zeros up to this.
    action_dim: int = 32
    # Actions per chunk.
    action_horizon: int = 50
    # Tokens kept for the prompt; None means the family's usual number.
    max_token_len: int | None = None
    # What products are computed in; master weights stay float32 in training.
    dtype: Dtype = "bfloat16"
    # The vision tower's size.
    vision: tyro.conf.Suppress[NamedVisionSize] = VISION["so400m"]
    # The size of the expert that reads images and prompt.
    vlm: NamedGemmaSize = GEMMA["gemma_2b"]
    # Rows of the embedding table.
    vocab_size: tyro.conf.Suppress[int] = 257_152
    # Images are resized to this many pixels square.
    image_size: tyro.conf.Suppress[int] = 224
    # The camera slots, in the order in which their tokens stand in the prefix.
    cameras: tyro.conf.Suppress[tuple[str, ...]] = _FLOW_CAMERAS
    # `bytes` is built in and needs no file: for small models.
    tokenizer: tyro.conf.Suppress[TokenizerName] = "paligemma"

    def __post_init__(self) -> None:
        counts = ("action_dim", "action_horizon", "prompt_length", "vocab_size", "image_size")
        for name in (*counts, "max_decoding_steps", "max_text_len", "max_fast_len"):
            if not 1 <= (count := getattr(self, name, 1)) <= _MAX_COUNT:
                found = reprlib.repr(count)
                raise ValueError(
                    f"model.{name} must be at least 1 and at most {_MAX_COUNT}, is {found}."
                )
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise ValueError(f"model.cameras must be distinct names, found {self.cameras}.")
        if self.image_size % self.vision.patch:
            raise ValueError(
                f"model.image_size ({self.image_size}) must be a multiple of the vision tower's "
                f"patch ({self.vision.patch})."
            )
        if self.tokenizer == "bytes" and self.vocab_size < 259:
            raise ValueError(
                f"The bytes tokenizer needs model.vocab_size of at least 259 (256 bytes, padding, "
                f"begin, end), found {self.vocab_size}."
            )

    @property
    @abc.abstractmethod
    def family(self) -> str:
        """The model's name as people say it."""

    @property
    @abc.abstractmethod
    def uses_quantiles(self) -> bool:
        """Whether states and actions are normalised by quantiles rather than mean and std."""

    @property
    @abc.abstractmethod
    def state_in_prompt(self) -> bool:
        """Whether the state is written into the prompt as numbers."""

    @property
    @abc.abstractmethod
    def usual_prompt_length(self) -> int:
        """The prompt's length if `max_token_len` is None."""

    # The experts in the order in which they run. Each name is an attribute of the model, and of
    # its configuration, where it is a `GemmaSize`.
    experts: ClassVar[tuple[str, ...]] = ("vlm",)
    # Whether actions are denoised by a flow; otherwise they are written as tokens.
    denoises: ClassVar[bool] = True
    # Whether the family is trained on randomly changed images.
    uses_augmentation: ClassVar[bool] = True
    # An absent camera is masked out (True), or shown to the model as a black image.
    masks_absent_cameras: ClassVar[bool] = True

    @property
    def action_tokenizer(self) -> str | None:
        """Location of the tokenizer of a model that learns actions as tokens; None for others."""
        return None

    @property
    def targets(self) -> tuple[Target, ...]:
        """What a flow model learns to write besides."""
        return ()

    @property
    def max_delay(self) -> int:
        """The longest delay that a flow model was trained for, in actions of a chunk."""
        return 0

    @property
    def num_steps(self) -> int | None:
        """Denoising steps per chunk, unless others are asked for; None: it does not denoise."""
        return None

    @property
    def prompt_length(self) -> int:
        return self.usual_prompt_length if self.max_token_len is None else self.max_token_len

    @property
    def tokens_per_camera(self) -> int:
        return (self.image_size // self.vision.patch) ** 2


@register("pi0")
@dataclasses.dataclass(frozen=True)
class Pi0Config(ModelConfig):
    """A flow model: π0, or π0.5 with `pi05`."""

    experts = ("vlm", "action_expert")

    # The size of the expert that reads state and noisy actions.
    action_expert: NamedGemmaSize = GEMMA["gemma_300m"]
    # π0.5: no state token; time enters through adaptive norms.
    pi05: bool = False
    # Write the state into the prompt as numbers. None: as the family does (π0.5 yes, π0 no).
    discrete_state_input: bool | None = None
    # What the VLM learns to write behind the prompt: `text` (subtasks, answers to questions) and
    # `fast` (the actions as FAST tokens, in training only). None of them: as openpi's models.
    targets: tuple[Target, ...] = ()
    # The action expert reads detached keys and values, so that the flow loss does not train the
    # VLM (knowledge insulation).
    insulate: bool = False
    # Weight of the loss of the written tokens; that of the flow loss is 1.
    token_loss_weight: float = 1.0
    # Tokens kept for the response text and for the FAST tokens.
    max_text_len: int = 52
    max_fast_len: int = 256
    # Where the FAST action tokenizer's files are (a folder or a location); None: the public one.
    fast_tokenizer: str | None = None
    # Trained real-time chunking: the model learns to continue up to this many actions that the
    # robot is already committed to. They are actions of a chunk: with --data.action-stride each is
    # several control steps. 0: off.
    max_delay: Annotated[int, tyro.conf.arg(aliases=("--max-delay",))] = 0
    # Denoising steps that the model was distilled to (`piston distill`). None: it was not.
    distilled_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_delay < self.action_horizon:
            raise ValueError(
                f"--max-delay is {self.max_delay}; expected 0 to {self.action_horizon - 1}: a "
                f"chunk has {self.action_horizon} actions, and at least one has to be free."
            )
        if self.distilled_steps is not None and not 1 <= self.distilled_steps <= 5:
            raise ValueError(
                f"model.distilled_steps is {self.distilled_steps}; expected 1 to 5: each has to "
                "replace at least two of ten ordinary steps."
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"model.targets names a target twice: {', '.join(self.targets)}.")
        if not 0 < self.token_loss_weight < math.inf:
            raise ValueError(
                f"model.token_loss_weight must be a positive number, is {self.token_loss_weight}. "
                "To train without these tokens, leave model.targets empty."
            )
        if self.insulate and not self.targets:
            raise ValueError(
                "With model.insulate and without model.targets nothing would train the VLM. Set "
                "model.targets to fast, text or both, or freeze the VLM: --freeze 'vlm.*'"
            )
        if self.fast_tokenizer is not None and "fast" not in self.targets:
            raise ValueError(
                "model.fast_tokenizer would do nothing: model.targets does not name fast."
            )
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self.vlm, name), getattr(self.action_expert, name)
            if ours != theirs:
                raise ValueError(
                    f"The experts share one attention, so their {name} must agree: "
                    f"vlm has {ours}, action_expert has {theirs}."
                )
        if self.action_expert.width % 2:
            raise ValueError(
                f"action_expert.width must be even, for the sines and cosines of time; found "
                f"{self.action_expert.width}."
            )

    @property
    def num_steps(self) -> int:
        return self.distilled_steps or 10

    @property
    def family(self) -> str:
        return "π0.5" if self.pi05 else "π0"

    @property
    def uses_quantiles(self) -> bool:
        return self.pi05

    @property
    def usual_prompt_length(self) -> int:
        return 200 if self.pi05 else 48

    @property
    def state_in_prompt(self) -> bool:
        return self.pi05 if self.discrete_state_input is None else self.discrete_state_input

    @property
    def action_tokenizer(self) -> str | None:
        return (self.fast_tokenizer or PUBLIC_FAST) if "fast" in self.targets else None


@register("pi0_fast")
@dataclasses.dataclass(frozen=True)
class Pi0FASTConfig(ModelConfig):
    """The autoregressive model: actions as FAST tokens."""

    family = "π0-FAST"
    uses_quantiles = state_in_prompt = True
    usual_prompt_length = 250
    denoises = masks_absent_cameras = uses_augmentation = False

    # Actions per chunk.
    action_horizon: int = 32
    # The camera slots, in the order in which their tokens stand in the prefix.
    cameras: tyro.conf.Suppress[tuple[str, ...]] = _FAST_CAMERAS
    # Where the FAST action tokenizer's files are (a folder or a location); None: the public one.
    fast_tokenizer: str | None = None
    # Decoding stops here if no end token came.
    max_decoding_steps: int = 256

    @property
    def action_tokenizer(self) -> str:
        return self.fast_tokenizer or PUBLIC_FAST

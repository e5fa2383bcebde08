"""What a model is made of: the configurations of π0, π0.5 and π0-FAST.

Sizes, cameras, vocabulary and prompt length; no tensors, so that listing presets needs no torch.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import tyro

from piston.models.variants import (
    GEMMA,
    VISION,
    GemmaSize,
    VisionSize,
    parse_gemma_size,
    parse_vision_size,
    size_name,
)
from piston.serialization import register
from piston.tokenizers.fast import PUBLIC_FAST

Dtype = Literal["float32", "bfloat16"]
TokenizerName = Literal["paligemma", "bytes"]

_FLOW_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_FAST_CAMERAS = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb")


def _named(
    parse: Callable[[str], GemmaSize | VisionSize],
) -> tyro.constructors.PrimitiveConstructorSpec:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME|width=…,depth=…",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, GemmaSize | VisionSize),
        str_from_instance=lambda size: [size_name(size)],
    )


NamedGemmaSize = Annotated[GemmaSize, _named(parse_gemma_size)]
NamedVisionSize = Annotated[VisionSize, _named(parse_vision_size)]


@dataclasses.dataclass(frozen=True)
class ModelConfig(abc.ABC):
    """What every model has. Its families are π0 / π0.5 and π0-FAST."""

    # Numbers per action; the robot's are padded with zeros up to this.
    action_dim: int = 32
    # Actions per chunk.
    action_horizon: int = 50
    # Tokens kept for the prompt; None means the family's usual number.
    max_token_len: int | None = None
    # What products are computed in; master weights stay float32 in training.
    dtype: Dtype = "bfloat16"
    # The vision tower's size, by name or by numbers.
    vision: NamedVisionSize = VISION["so400m"]
    # The size of the expert that reads images and prompt.
    vlm: NamedGemmaSize = GEMMA["gemma_2b"]
    # Rows of the embedding table.
    vocab_size: int = 257_152
    # Images are resized to this many pixels square.
    image_size: int = 224
    # The camera slots, in the order in which their tokens stand in the prefix.
    cameras: tuple[str, ...] = _FLOW_CAMERAS
    # `bytes` is built in and needs no file: for small models.
    tokenizer: TokenizerName = "paligemma"

    def __post_init__(self) -> None:
        for name in ("action_dim", "action_horizon", "prompt_length", "vocab_size", "image_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, is {getattr(self, name)}.")
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
    def usual_prompt_length(self) -> int:
        """Tokens kept for the prompt when `max_token_len` does not say."""

    @property
    def prompt_length(self) -> int:
        return self.usual_prompt_length if self.max_token_len is None else self.max_token_len

    @property
    def denoises(self) -> bool:
        """Whether actions are denoised by a flow; otherwise they are written as tokens."""
        return self.action_tokenizer is None

    @property
    def uses_augmentation(self) -> bool:
        """Whether the family is trained on randomly changed images."""
        return True

    @property
    def uses_quantiles(self) -> bool:
        """Whether states and actions are normalised by quantiles rather than mean and std."""
        return True

    @property
    def masks_absent_cameras(self) -> bool:
        """An absent camera is masked out (True), or shown to the model as a black image."""
        return True

    @property
    def state_in_prompt(self) -> bool:
        """Whether the state is written into the prompt as numbers."""
        return False

    @property
    def action_tokenizer(self) -> str | None:
        """Location of the tokenizer of a model that writes actions as tokens; None for others."""
        return None

    @property
    def tokens_per_camera(self) -> int:
        return (self.image_size // self.vision.patch) ** 2


@register("pi0")
@dataclasses.dataclass(frozen=True)
class Pi0Config(ModelConfig):
    """A flow model: π0, or π0.5 with `pi05`."""

    # The size of the expert that reads state and noisy actions.
    action_expert: NamedGemmaSize = GEMMA["gemma_300m"]
    # π0.5: no state token; time enters through adaptive norms.
    pi05: bool = False
    # Write the state into the prompt as numbers. None: as the family does (π0.5 yes, π0 no).
    discrete_state_input: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
    def family(self) -> str:
        return "π0.5" if self.pi05 else "π0"

    @property
    def usual_prompt_length(self) -> int:
        return 200 if self.pi05 else 48

    @property
    def state_in_prompt(self) -> bool:
        return self.pi05 if self.discrete_state_input is None else self.discrete_state_input

    @property
    def uses_quantiles(self) -> bool:
        return self.pi05


@register("pi0_fast")
@dataclasses.dataclass(frozen=True)
class Pi0FASTConfig(ModelConfig):
    """The autoregressive model: actions as FAST tokens."""

    # Actions per chunk.
    action_horizon: int = 32
    # The camera slots, in the order in which their tokens stand in the prefix.
    cameras: tuple[str, ...] = _FAST_CAMERAS
    # Where the FAST action tokenizer's files are (a folder or a location); None: the public one.
    fast_tokenizer: str | None = None
    # Decoding stops here if no end token came.
    max_decoding_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_decoding_steps < 1:
            raise ValueError(
                f"model.max_decoding_steps must be at least 1, is {self.max_decoding_steps}."
            )

    @property
    def family(self) -> str:
        return "π0-FAST"

    @property
    def usual_prompt_length(self) -> int:
        return 250

    @property
    def masks_absent_cameras(self) -> bool:
        return False

    @property
    def state_in_prompt(self) -> bool:
        return True

    @property
    def action_tokenizer(self) -> str:
        return self.fast_tokenizer or PUBLIC_FAST

    @property
    def uses_augmentation(self) -> bool:
        return False

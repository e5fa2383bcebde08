"""The types that flow through everything: the observation a model gets, the actions it returns.

Dims: b batch, h image height, w image width, c colour channels, s state dim, l prompt length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

# A normalised chunk as the models see it: (batch, horizon, action dim).
Actions = Float[Tensor, "b horizon a"]
Image = UInt8[Tensor, "_ _ _ 3"] | Float[Tensor, "_ _ _ 3"]

# The parts that an observation may lack; None keeps the dtype that they come in.
_TOKEN_DTYPES = {
    "tokenized_prompt": None,
    "tokenized_prompt_mask": torch.bool,
    "token_ar_mask": None,
    "token_loss_mask": torch.bool,
    "token_hidden_mask": torch.bool,
    "writes_text": torch.bool,
}


@dataclasses.dataclass(frozen=True)
class Observation:
    """One batch of images, states and prompts.

    Images stay uint8 until they are on the device; a float image is already in [−1, 1].
    A camera whose mask is False is absent for that sample.
    Masks may stay on the CPU: models turn them into indices there, without waiting for the device.

    For a model that writes tokens the prompt includes those that it has to learn or that are given:
    `token_ar_mask` has a 1 where a token attends only to those before it, `token_loss_mask` marks
    what has to be learned, `token_hidden_mask` what an action expert does not attend to.
    `writes_text` says which samples write their response text themselves; without it these are all
    samples without one.
    """

    images: dict[str, Image]
    image_masks: dict[str, Bool[Tensor, " b"]]
    state: Float[Tensor, "b s"]
    tokenized_prompt: Int[Tensor, "b l"] | None = None
    tokenized_prompt_mask: Bool[Tensor, "b l"] | None = None
    token_ar_mask: Int[Tensor, "b l"] | None = None
    token_loss_mask: Bool[Tensor, "b l"] | None = None
    token_hidden_mask: Bool[Tensor, "b l"] | None = None
    writes_text: Bool[Tensor, " b"] | None = None

    def __post_init__(self) -> None:
        if self.images.keys() != self.image_masks.keys():
            raise ValueError(
                f"Images and image masks name different cameras: images {sorted(self.images)}, "
                f"masks {sorted(self.image_masks)}. Give one mask per camera."
            )
        parts = {
            **{f"image/{name}": image for name, image in self.images.items()},
            **{f"image_mask/{name}": mask for name, mask in self.image_masks.items()},
            **{name: getattr(self, name) for name in _TOKEN_DTYPES},
        }
        for name, value in parts.items():
            if value is not None and value.shape[:1] != self.state.shape[:1]:
                raise ValueError(
                    f"Observation part {name!r} has shape {tuple(value.shape)}; its first axis "
                    f"must be the batch of {self.state.shape[0]} that the state has."
                )

    @property
    def batch_size(self) -> int:
        return self.state.shape[0]

    @property
    def device(self) -> torch.device:
        return self.state.device

    @classmethod
    def from_dict(cls, batch: Mapping[str, Any]) -> Observation:
        """Create it from a batch as the model transforms give it: NumPy arrays or tensors."""
        for key in ("image", "image_mask", "state"):
            if key not in batch:
                raise KeyError(f"Batch has no {key!r}; it has {sorted(batch)}.")
        return cls(
            images={name: _tensor(image) for name, image in batch["image"].items()},
            image_masks={name: _tensor(mask).bool() for name, mask in batch["image_mask"].items()},
            state=_tensor(batch["state"]).float(),
            **{
                name: _tensor(batch[name]).to(dtype)
                for name, dtype in _TOKEN_DTYPES.items()
                if batch.get(name) is not None
            },
        )

    def to(self, device: torch.device | str) -> Observation:
        """Return it with images, state and prompt on the device; masks stay where they are."""
        prompt = self.tokenized_prompt
        return dataclasses.replace(
            self,
            images={name: send(image, device) for name, image in self.images.items()},
            state=send(self.state, device),
            tokenized_prompt=None if prompt is None else send(prompt, device),
        )


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting for it: from pinned memory if it is a GPU."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))


def stack_samples(
    samples: Sequence[Mapping[str, Any]],
    allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
    *,
    within: str = "",
) -> dict[str, Any]:
    """Stack samples (nested dictionaries of arrays) into one dictionary of tensors (b, …).

    `allocate(shape, dtype)` returns the memory of each tensor. Raise ValueError if the samples
    differ in keys, shapes or dtypes, or hold anything but numbers.
    """
    first = samples[0]
    batch: dict[str, Any] = {}
    for number, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise ValueError(
                f"Samples of one batch have different keys: sample 0 has {sorted(first)}, sample "
                f"{number} has {sorted(sample)}."
            )
    for key, value in first.items():
        parts, name = [sample[key] for sample in samples], f"{within}{key}"
        if isinstance(value, Mapping):
            batch[key] = stack_samples(parts, allocate, within=f"{name}/")
        else:
            arrays = [np.asarray(part) for part in parts]
            _check_alike(arrays, name)
            stacked = allocate((len(arrays), *arrays[0].shape), arrays[0].dtype)
            batch[key] = torch.from_numpy(np.stack(arrays, out=stacked))
    return batch


def _check_alike(arrays: Sequence[np.ndarray], name: str) -> None:
    first = arrays[0]
    if first.dtype.kind not in "biuf":
        raise ValueError(f"{name!r} is of {first.dtype}; a batch holds only numbers.")
    for number, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ValueError(
                f"{name!r} is {first.dtype}{list(first.shape)} in sample 0 of a batch and "
                f"{array.dtype}{list(array.shape)} in sample {number}; they must be alike."
            )

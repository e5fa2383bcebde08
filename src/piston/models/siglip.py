"""The vision tower: a ViT that turns each image into patch tokens of the VLM's width.

Dims: n images, t patches, d vision width, w VLM width.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piston.models.configs import VisionSize
from piston.models.layers import compiled_once
from piston.models.precision import Linear, attention, join
from piston.observation import Image


def to_unit_range(image: Image) -> Float[Tensor, "n h w c"]:
    """Convert bytes to float32 in [−1, 1]; float images have that range already."""
    return image.float() if image.is_floating_point() else image.float() / 127.5 - 1.0


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32 and returned in its input's dtype."""

    def forward(self, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
        if x.device.type == "cpu":  # whose kernel converts, number by number
            return super().forward(x)
        return super().forward(x.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.joined: Linear | None = None
        self.num_heads = size.num_heads
        self.query = Linear(size.width, size.width)
        self.key = Linear(size.width, size.width)
        self.value = Linear(size.width, size.width)
        self.output = Linear(size.width, size.width)

    def join(self) -> None:
        """Join the matrices of queries, keys and values into one, for inference."""
        self.joined = join(self, ("query", "key", "value"))

    def forward(self, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
        """Return the mixed values of all heads, before the output matrix."""
        if self.joined is None:
            parts = [linear(x) for linear in (self.query, self.key, self.value)]
        else:
            parts = self.joined(x).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        return attention(query, key, value).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.up = Linear(size.width, size.mlp_dim)
        self.down = Linear(size.mlp_dim, size.width)

    def forward(self, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t m"]:
        """Return the hidden numbers, before the matrix that leads down again."""
        return self.up.gelu(x)


class Block(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(size.width, eps=1e-6)
        self.attention = Attention(size)
        self.mlp_norm = LayerNorm(size.width, eps=1e-6)
        self.mlp = MLP(size)

    def forward(self, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
        x = self.attention.output(self.attention(self.attention_norm(x)), x)
        return self.mlp.down(self.mlp(self.mlp_norm(x)), x)


def make_patch_embedding(size: VisionSize) -> nn.Module:
    """Return a single convolution over patches, or a stem of small ones that halve the image."""
    if not size.stem:
        return nn.Conv2d(3, size.width, size.patch, stride=size.patch)
    layers: list[nn.Module] = []
    channels, patch = 3, size.patch
    while patch > 1:
        following = size.stem if not layers else 2 * channels
        layers += [nn.Conv2d(channels, following, 3, stride=2, padding=1), nn.GELU("tanh")]
        channels, patch = following, patch // 2
    return nn.Sequential(*layers, nn.Conv2d(channels, size.width, 1))


class VisionTower(nn.Module):
    def __init__(self, size: VisionSize, image_size: int, out_width: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.gradient_checkpointing = False
        self.num_tokens = (image_size // size.patch) ** 2
        self.patch_embedding = make_patch_embedding(size)
        self.position_embedding = nn.Parameter(torch.empty(self.num_tokens, size.width))
        self.reset_parameters()
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = LayerNorm(size.width, eps=1e-6)
        self.head = Linear(size.width, out_width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position_embedding, std=self.position_embedding.shape[1] ** -0.5)

    def forward(self, images: Image, dtype: torch.dtype) -> Float[Tensor, "n t w"]:
        """Return patch tokens; patch and position embeddings are float32, the rest is `dtype`."""
        if images.shape[1:] != (self.image_size, self.image_size, 3):
            raise ValueError(
                f"The vision tower reads images of {self.image_size} × {self.image_size} × 3, "
                f"found {' × '.join(map(str, images.shape[1:]))}. Resize them before."
            )
        patches = self.patch_embedding(to_unit_range(images).movedim(-1, 1))
        x = (patches.flatten(2).transpose(1, 2) + self.position_embedding).to(dtype)
        for block in self.blocks:
            recompute = self.gradient_checkpointing
            x = checkpoint(block, x, use_reentrant=False) if recompute else _run(block, x)
        return self.head(self.norm(x))


@compiled_once
def _run(block: Block, x: Float[Tensor, "n t d"]) -> Float[Tensor, "n t d"]:
    return block(x)

"""A convolutional stem gives one token per patch, like the single convolution it replaces."""

import pytest
import torch

from piston.models.configs import VisionSize, size_name
from piston.models.siglip import VisionTower


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stem_gives_one_token_per_patch(depth):
    size = VisionSize(width=24, depth=depth, mlp_dim=16, num_heads=2, patch=16, stem=4)
    tower = VisionTower(size, image_size=96, out_width=10)
    channels = [m.out_channels for m in tower.patch_embedding if isinstance(m, torch.nn.Conv2d)]
    assert channels == [4, 8, 16, 32, 24]
    tokens = tower(torch.zeros(2, 96, 96, 3, dtype=torch.uint8), torch.float32)
    assert tokens.shape == (2, 36, 10)


def test_a_token_depends_on_its_own_patch_and_its_neighbours():
    torch.manual_seed(0)
    size = VisionSize(width=24, depth=0, mlp_dim=16, num_heads=2, patch=8, stem=4)
    tower = VisionTower(size, image_size=32, out_width=10)
    image = torch.zeros(1, 32, 32, 3)
    changed = image.clone()
    changed[:, 8:16, 16:24] = 1.0  # the patch in row 1, column 2
    difference = (tower(changed, torch.float32) - tower(image, torch.float32)).norm(dim=-1)[0]
    # Strided convolutions reach into the patches below and to the right, no further.
    assert difference.nonzero().flatten().tolist() == [6, 7, 10, 11]


def test_sizes_that_a_stem_cannot_have():
    size = VisionSize(width=24, depth=0, mlp_dim=16, num_heads=2, patch=16, stem=4)
    assert size_name(size) == "width=24,depth=0,mlp_dim=16,num_heads=2,patch=16,stem=4"
    with pytest.raises(ValueError, match="power of two"):
        VisionSize(width=24, depth=0, mlp_dim=16, num_heads=2, patch=14, stem=4)
    with pytest.raises(ValueError, match="depth must be a whole number of at least 1"):
        VisionSize(width=24, depth=0, mlp_dim=16, num_heads=2, patch=14)

"""The inputs of static graphs, made from an observation whose samples have the same cameras."""

from torch import Tensor, stack

from piston.models.flow import Pi0
from piston.observation import Observation


def inputs_of(model: Pi0, observation: Observation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, prompt, lengths and state."""
    masks = observation.image_masks
    cameras = [name for name in model.config.cameras if bool(masks[name].all())]
    words = observation.tokenized_prompt_mask.sum(1)
    images = stack([observation.images[name] for name in cameras], dim=1)
    lengths = words + len(cameras) * model.config.tokens_per_camera
    return images, observation.tokenized_prompt, lengths, observation.state

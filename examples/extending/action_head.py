"""Another action head for π0: two more layers, for `TrainConfig.model`."""

import dataclasses

from torch import Tensor, nn

from piston import presets
from piston.models.build import register_model
from piston.models.configs import Pi0Config
from piston.models.flow import Pi0
from piston.serialization import register


@register("pi0_deep_head")
@dataclasses.dataclass(frozen=True)
class DeepHeadConfig(Pi0Config):
    """π0 or π0.5 with a deeper action head."""

    # Width of the hidden layer of the action head.
    head_width: int = 256

    @property
    def family(self) -> str:
        return f"{super().family} with a deep head"


class DeepHead(nn.Linear):
    """Map the expert's tokens to actions, after two layers that change them."""

    def __init__(self, width: int, hidden: int, action_dim: int) -> None:
        super().__init__(width, action_dim)
        self.more = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + self.more(input))


@register_model(DeepHeadConfig)
class DeepHeadPi0(Pi0):
    """The model of a `DeepHeadConfig`."""

    def __init__(self, config: DeepHeadConfig) -> None:
        super().__init__(config)
        width = config.action_expert.width
        self.suffix.action_out = DeepHead(width, config.head_width, config.action_dim)


tiny = presets.get("tiny_robot")
model = DeepHeadConfig(**vars(tiny.model))
presets.register(dataclasses.replace(tiny, name="tiny_deep_head", model=model))

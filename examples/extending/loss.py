"""Another loss for π0: the first action of a chunk counts more, for `TrainConfig.model`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from piston.models.build import register_model
from piston.models.configs import Pi0Config
from piston.models.flow import Pi0
from piston.observation import Observation
from piston.serialization import register


@register("pi0_first_action")
@dataclasses.dataclass(frozen=True)
class FirstActionConfig(Pi0Config):
    """π0 or π0.5 with a loss of its own for the first action."""

    # How much that loss counts, beside 1 for the velocity.
    first_action_weight: float = 0.5


@register_model(FirstActionConfig)
class FirstActionPi0(Pi0):
    """The model of a `FirstActionConfig`."""

    config: FirstActionConfig

    @property
    def loss_names(self) -> tuple[str, ...]:
        return (*super().loss_names, "first_action")

    def training_losses(
        self, observation: Observation, actions: Tensor | None, draws: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        losses = super().training_losses(observation, actions, draws)
        error = losses["velocity"][:, 0]
        return {**losses, "first_action": self.config.first_action_weight * error}

    def loss_weights(self, batch: Mapping[str, Any], action_weights: Tensor) -> dict[str, Tensor]:
        weights = super().loss_weights(batch, action_weights)
        return {**weights, "first_action": action_weights[:, 0]}

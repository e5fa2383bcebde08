"""Presets of the UR5 arm."""

from piston.config import AssetsConfig, TrainConfig
from piston.models.configs import Pi0Config
from piston.robots.simple import LeRobotUR5DataConfig

PRESETS = (
    TrainConfig(
        name="pi0_ur5",
        model=Pi0Config(),
        data=LeRobotUR5DataConfig(
            # The statistics that the base model was trained with on this arm.
            assets=AssetsConfig("gs://openpi-assets/checkpoints/pi0_base/assets", "ur5e"),
            prompt_from_task=True,
        ),
        weights="gs://openpi-assets/checkpoints/pi0_base/params",
    ),
)

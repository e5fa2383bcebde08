"""Presets of the ALOHA robot."""

from piston.config import AssetsConfig, TrainConfig
from piston.models.configs import Pi0Config
from piston.robots.aloha import CAMERAS, LeRobotAlohaDataConfig, repack_aloha

_THREE_CAMERAS = repack_aloha(**{name: f"observation.images.{name}" for name in CAMERAS})


def _pen_uncap(base: str) -> LeRobotAlohaDataConfig:
    return LeRobotAlohaDataConfig(
        repo_id="physical-intelligence/aloha_pen_uncap_diverse",
        assets=AssetsConfig(f"gs://openpi-assets/checkpoints/{base}/assets", "trossen"),
        default_prompt="uncap the pen",
        repack_transforms=_THREE_CAMERAS,
    )


def _real_robot(name: str, model: Pi0Config, default_prompt: str | None = None) -> TrainConfig:
    """For inference only."""
    data = LeRobotAlohaDataConfig(
        assets=AssetsConfig(asset_id="trossen"), default_prompt=default_prompt
    )
    pose = {"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}
    return TrainConfig(name=name, model=model, data=data, policy_metadata=pose)


PRESETS = (
    _real_robot("pi0_aloha", Pi0Config()),
    _real_robot("pi05_aloha", Pi0Config(pi05=True)),
    _real_robot("pi0_aloha_towel", Pi0Config(), "fold the towel"),
    _real_robot(
        "pi0_aloha_tupperware", Pi0Config(), "open the tupperware and put the food on the plate"
    ),
    # For fine-tuning.
    TrainConfig(
        name="pi0_aloha_pen_uncap",
        model=Pi0Config(),
        data=_pen_uncap("pi0_base"),
        weights="gs://openpi-assets/checkpoints/pi0_base/params",
        num_train_steps=20_000,
    ),
    TrainConfig(
        name="pi05_aloha_pen_uncap",
        model=Pi0Config(pi05=True),
        data=_pen_uncap("pi05_base"),
        weights="gs://openpi-assets/checkpoints/pi05_base/params",
        num_train_steps=20_000,
        batch_size=64,
    ),
    TrainConfig(
        name="pi0_aloha_sim",
        model=Pi0Config(),
        data=LeRobotAlohaDataConfig(
            repo_id="lerobot/aloha_sim_transfer_cube_human",
            default_prompt="Transfer cube",
            use_delta_joint_actions=False,
        ),
        weights="gs://openpi-assets/checkpoints/pi0_base/params",
        num_train_steps=20_000,
    ),
)

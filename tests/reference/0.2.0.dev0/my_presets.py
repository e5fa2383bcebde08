"""A file as users name in `PISTON_PRESETS`: a robot with arithmetic, and small presets.

It was written for version 0.2.0.dev0 and must keep working as it is.
"""

import dataclasses

import numpy as np

from piston import presets
from piston.config import AdamW, AssetsConfig, CosineDecaySchedule, MixtureDataConfig, TrainConfig
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.robots import RobotDataConfig, RobotInputs
from piston.robots.description import DescribedRobotDataConfig
from piston.robots.image_text import ImageTextDataConfig
from piston.serialization import register
from piston.transforms import Group

GEMMA = GemmaSize(width=12, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=4)
MODEL = Pi0Config(
    action_dim=4,
    action_horizon=4,
    max_token_len=32,
    dtype="float32",
    vision=VisionSize(width=8, depth=1, mlp_dim=12, num_heads=2, patch=8),
    vlm=GEMMA,
    action_expert=dataclasses.replace(GEMMA, width=8),
    vocab_size=260,
    image_size=16,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    tokenizer="bytes",
)
JOINTS = ("base", "elbow")


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float

    def __call__(self, data):
        scaled = {key: self.factor * data[key] for key in ("state", "actions") if key in data}
        return {**data, **scaled}


@register("degrees_cart")  # its name in checkpoints
@dataclasses.dataclass(frozen=True)
class DegreesCartDataConfig(RobotDataConfig):
    inputs = RobotInputs(
        name="DegreesCart",
        cameras={"front": "base_0_rgb", "rear": "left_wrist_0_rgb"},
        state={"joints": JOINTS},
        actions={"actions": JOINTS},
        columns={"front": "mast", "rear": "bumper", "joints": "wheels", "actions": "speed"},
        relative=JOINTS,
    )

    def conversions(self):
        return Group(inputs=[Scale(np.pi / 180)], outputs=[Scale(180 / np.pi)])


DEGREES = presets.register(
    TrainConfig(
        name="degrees_cart",
        model=MODEL,
        data=DegreesCartDataConfig(
            repo_id="data/cart",
            assets=AssetsConfig(assets_dir="assets", asset_id="degrees_cart"),
            prompt_from_task=True,
        ),
        lr_schedule=CosineDecaySchedule(2, 1e-2, decay_steps=20, decay_lr=1e-3),
        optimizer=AdamW(weight_decay=1e-4),
        augmentation=False,
        batch_size=4,
        num_workers=0,
        num_train_steps=6,
        log_interval=1,
        save_interval=1_000,
        keep_period=None,
        keep_last=10,
    )
)
# For `--robot FILE`.
DESCRIBED = presets.register(
    dataclasses.replace(
        DEGREES, name="described_arm", data=DescribedRobotDataConfig(repo_id="data/arm")
    )
)
MIXTURE = presets.register(
    dataclasses.replace(
        DEGREES,
        name="cart_and_questions",
        model=dataclasses.replace(MODEL, targets=("text",), max_text_len=8, max_token_len=48),
        data=MixtureDataConfig(
            {
                "cart": dataclasses.replace(DEGREES.data, share=3),
                "questions": ImageTextDataConfig(repo_id="data/arm", share=1),
            }
        ),
        mask_padded_dims=True,
        mask_padded_steps=True,
    )
)

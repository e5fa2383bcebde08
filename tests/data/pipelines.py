"""A robot with three joints and two cameras, for the data sets of `synthetic`."""

import numpy as np

from piston.config import DataConfig, ModelTransformFactory
from piston.models.configs import GEMMA, VISION, Pi0Config
from piston.transforms import ALWAYS_KEPT, Group, RepackTransform
from piston.transforms.actions import DeltaActions
from piston.transforms.images import to_uint8_hwc
from piston.transforms.normalize import NormStats

TOP, WRIST = "observation.images.top", "observation.images.wrist"
SLOTS = {"top": "base_0_rgb", "wrist": "left_wrist_0_rgb"}
HORIZON = 6
MODEL = Pi0Config(
    action_dim=4,
    action_horizon=HORIZON,
    image_size=28,
    vision=VISION["dummy"],
    vlm=GEMMA["dummy"],
    action_expert=GEMMA["dummy"],
    tokenizer="bytes",
)
STATS = {
    key: NormStats(np.full(3, 5.0), np.full(3, 2.0), np.full(3, 1.0), np.full(3, 9.0))
    for key in ("state", "actions")
}


def three_joints(data):
    """Inputs without checks, as a user may write them."""
    state = np.asarray(data["state"])
    images = {SLOTS[name]: to_uint8_hwc(image, name) for name, image in data["images"].items()}
    return {
        "image": images,
        "image_mask": {slot: np.ones(state.shape[:-1], bool)[()] for slot in images},
        "state": state,
        "actions": np.asarray(data["actions"]),
        **{key: data[key] for key in ALWAYS_KEPT if key in data},
    }


def data_config(root, *, cameras=("top",), robot=(three_joints,), **changes):
    images = {name: f"observation.images.{name}" for name in cameras}
    keys = {"images": images, "state": "observation.state", "actions": "action"}
    return DataConfig(
        **{
            "repo_id": str(root),
            "asset_id": "three_joints",
            "norm_stats": STATS,
            "repack_transforms": Group(inputs=(RepackTransform(keys),)),
            "data_transforms": Group(inputs=(*robot, DeltaActions((True, True, False)))),
            "model_transforms": ModelTransformFactory("do it")(MODEL),
            "action_sequence_keys": ("action",),
            **changes,
        }
    )

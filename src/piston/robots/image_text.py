"""Pictures with questions and answers, without a robot: a model learns to answer from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from piston.config import DataConfig, DataConfigFactory
from piston.models.configs import ModelConfig
from piston.serialization import register
from piston.suggestions import did_you_mean
from piston.transforms import Data, Group, require
from piston.transforms.images import to_uint8_hwc


@dataclasses.dataclass(frozen=True)
class ShowPicture:
    """Put a picture into one of the model's camera slots; the state is zero."""

    slot: str
    state_dim: int

    def __call__(self, data: Data) -> Data:
        picture = to_uint8_hwc(require(data, "image", "ShowPicture"), "image")
        texts = [key for key in ("question", "answer") if key in data]
        return {
            "image": {self.slot: picture},
            "image_mask": {self.slot: np.True_},
            "state": np.zeros((*picture.shape[:-3], self.state_dim), np.float32),
            **{key: data[key] for key in texts},
        }


@register("image_text")
@dataclasses.dataclass(frozen=True)
class ImageTextDataConfig(DataConfigFactory):
    """Questions about pictures, to train a model's text together with robots.

    The data set is a folder with a table (JSON lines or parquet: image, question, answer), or a
    LeRobot data set whose `language_events` hold questions (style vqa).
    """

    robot = "pictures with questions"
    has_actions = False

    # The camera slot that shows the picture.
    slot: str = "base_0_rgb"

    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        if "text" not in model_config.targets:
            raise ValueError(
                "Questions and answers train the text of a model: name text in --model.targets."
            )
        if self.slot not in model_config.cameras:
            raise ValueError(
                f"Pictures are to be shown in {self.slot!r}, which is no camera slot of this "
                f"model.{did_you_mean(self.slot, model_config.cameras)} It has "
                f"{', '.join(model_config.cameras)}."
            )
        unused = ("default_prompt", "subtasks", "prompt_from_task", "norm_floor")
        if given := [name for name in unused if getattr(self, name)]:
            raise ValueError(f"{', '.join(given)} would do nothing for pictures with questions.")
        return dataclasses.replace(
            self.create_base_config(assets_dirs, model_config),
            has_actions=False,
            data_transforms=Group([ShowPicture(self.slot, model_config.action_dim)]),
        )

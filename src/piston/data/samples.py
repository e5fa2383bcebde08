"""From a frame of a data set to what the model sees: the data set's item through all transforms.

item → prompt from the task → repack → robot → normalize → model transforms → sample
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from piston.config import DataConfig
from piston.data.open import PADDING_KEY
from piston.data.problems import advising
from piston.data.protocol import Samples, blocks_of
from piston.models.configs import ModelConfig
from piston.transforms import Data, compose

# What a sample holds of an item: what models take, and where it came from.
MODEL_KEYS = (
    *("image", "image_mask", "state", "actions", PADDING_KEY, "action_dims"),
    *("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "token_loss_mask"),
    "token_hidden_mask",
)
PLACE_KEYS = ("set_index", "episode_index", "frame_index", "index")


class TrainingData:
    """`data[i]` is frame i as the model sees it: NumPy arrays, images uint8.

    `action_is_pad` (horizon,) marks steps beyond the end of the episode, `action_dims` says how
    many dimensions of the actions are the robot's. A picture with a question has none: its state
    and actions are zeros. Errors name the data set, the episode and the frame.
    """

    def __init__(self, dataset: Samples, config: DataConfig, model: ModelConfig) -> None:
        self._dataset = dataset
        self._config, self._chunk = config, (model.action_horizon, model.action_dim)
        tasks = (PromptFromItem(),) if config.prompt_from_task and config.has_actions else ()
        self._transform = compose((*tasks, *config.input_transforms(training=True)))
        self._padding = f"{config.action_sequence_keys[0]}_is_pad"
        stats = (config.norm_stats or {}).get("actions")
        self._action_dims = 0 if not config.has_actions else stats.dim if stats else self._chunk[1]

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def blocks(self) -> np.ndarray | None:
        return blocks_of(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with advising(self._config):
            item = self._dataset[index]
        place = {"episode_index": 0, "frame_index": index, "index": index, **item}
        try:
            sample = self._robot_sample(item) if self._config.has_actions else self._answer(item)
            kept = {key: sample[key] for key in MODEL_KEYS if key in sample}
            kept["action_dims"] = np.int64(self._action_dims)
            for key in ("state", "actions"):
                kept[key] = np.asarray(kept[key], np.float32)
            place["set_index"] = self._config.set_index
            return kept | {key: np.int64(place[key]) for key in PLACE_KEYS}
        except Exception as error:
            where = f"frame {place['frame_index']} of episode {place['episode_index']}"
            if not self._config.has_actions:
                where = f"question {index}"
            error.add_note(f"in {where} of {self._config.title}")
            raise

    def _robot_sample(self, item: Data) -> Data:
        padding = np.asarray(item[self._padding])
        sample = self._transform({**item, PADDING_KEY: padding})
        num_steps = np.shape(sample["actions"])[-2]
        if PADDING_KEY not in sample and num_steps != len(padding):
            raise ValueError(
                f"The robot's transforms changed the chunk from {len(padding)} steps to "
                f"{num_steps} and dropped {PADDING_KEY!r}: return it with the actions, with "
                "the same steps."
            )
        return {PADDING_KEY: padding, **sample}

    def _answer(self, item: Data) -> Data:
        no_actions = {"actions": np.zeros(self._chunk), PADDING_KEY: np.ones(self._chunk[0], bool)}
        return {**self._transform(item), **no_actions}


@dataclasses.dataclass(frozen=True)
class PromptFromItem:
    """Take the task of an item as its prompt."""

    def __call__(self, data: Data) -> Data:
        return {**data, "prompt": data["task"]}


def check_cache(plain: TrainingData, cached: TrainingData) -> None:
    """Raise ValueError if it matters that cached frames are resized before other transforms."""
    for index in sorted({0, len(plain) // 2, len(plain) - 1}):
        expected, found = plain[index]["image"], cached[index]["image"]
        for name, image in expected.items():
            if not np.array_equal(found[name], image):
                raise ValueError(
                    f"With cached frames, camera {name!r} of frame {index} looks different: the "
                    "robot's transforms crop or rotate images before they are resized. Train "
                    "without the cache, or crop and rotate when recording."
                )


@dataclasses.dataclass(frozen=True)
class FakeDataset:
    """Random samples in the model's shapes; sample i is always the same."""

    model: ModelConfig
    length: int = 1024

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"There is no sample {index}; there are {self.length}.")
        model, random = self.model, np.random.default_rng([2024, index])
        pixels = (model.image_size, model.image_size, 3)
        chunk = (model.action_horizon, model.action_dim)
        images = {name: random.integers(256, size=pixels, dtype=np.uint8) for name in model.cameras}
        state = random.uniform(-1, 1, model.action_dim).astype(np.float32)
        actions = random.uniform(-1, 1, chunk).astype(np.float32)
        # Random tokens up to a random length; a model may have to write the second half.
        longest = model.prompt_length
        length = int(random.integers(longest // 2, longest + 1))
        mask = np.arange(longest) < length
        tokens = random.integers(1, model.vocab_size, longest).astype(np.int32)
        prompt = {"tokenized_prompt": np.where(mask, tokens, 0), "tokenized_prompt_mask": mask}
        if model.targets or not model.denoises:
            written = mask & (np.arange(longest) >= length // 2)
            prompt |= {"token_ar_mask": written.astype(np.int32), "token_loss_mask": written}
        if model.targets:  # an action expert attends to the first half of what is written
            prompt["token_hidden_mask"] = mask & (np.arange(longest) >= length * 3 // 4)
        return {
            "image": images,
            "image_mask": dict.fromkeys(model.cameras, np.True_),
            "state": state,
            "actions": actions,
            PADDING_KEY: np.zeros(model.action_horizon, bool),
            "action_dims": np.int64(model.action_dim),
            **prompt,
            **dict.fromkeys(("set_index", "episode_index"), np.int64(0)),
            **dict.fromkeys(("frame_index", "index"), np.int64(index)),
        }

"""Policies with random weights and a data set of their robot: for all that needs no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tests.models.tiny import IMAGE_SIZE, VISION, gemma, randomized

from piston import weights
from piston.config import DataConfig
from piston.data.record import Recorder
from piston.inference.policy import Policy
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.robots import RobotInputs
from piston.robots.description import DescribedRobotDataConfig
from piston.transforms import Data

FRONT, WRIST, STATE, ACTION = (
    *("observation.images.front", "observation.images.wrist"),
    *("observation.state", "action"),
)
BASE_SLOT, WRIST_SLOT, EMPTY_SLOT = "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"
JOINTS = ("shoulder", "elbow", "gripper")
TASKS = ("open the drawer", "close the drawer", "wait")
FPS, EPISODE = 10, 6
ROBOT = RobotInputs(
    name="arm",
    cameras={FRONT: BASE_SLOT, WRIST: WRIST_SLOT},
    state={STATE: JOINTS},
    actions={ACTION: JOINTS},
    columns={},
    relative=("shoulder",),
    rate=FPS,
)
_SIZES = {
    **{"action_dim": 4, "action_horizon": 4, "max_token_len": 64, "dtype": "float32"},
    **{"vision": VISION, "vlm": gemma(), "vocab_size": 300, "image_size": IMAGE_SIZE},
    **{"cameras": (BASE_SLOT, WRIST_SLOT, EMPTY_SLOT), "tokenizer": "bytes"},
}
MODELS: dict[str, ModelConfig] = {
    "pi0": Pi0Config(**_SIZES, action_expert=gemma(14)),
    "pi05": Pi0Config(**_SIZES | {"max_token_len": 128}, action_expert=gemma(14), pi05=True),
    "fast": Pi0FASTConfig(**_SIZES | {"max_token_len": 128}, max_decoding_steps=12),
    # Writes a subtask before its actions.
    "text": Pi0Config(**_SIZES, action_expert=gemma(14), targets=("text",), max_text_len=6),
}


def policy(kind: str, robot: RobotInputs = ROBOT) -> Policy:
    model = MODELS[kind]
    data = DescribedRobotDataConfig(
        description=robot, prompt_from_task=True, subtasks=kind == "text"
    )
    pipeline = dataclasses.replace(data.create("assets", model), norm_stats={})
    if kind == "fast":
        pipeline = _tokens_as_actions(pipeline)
    return with_random_weights(model, pipeline)


def with_random_weights(model: ModelConfig, pipeline: DataConfig) -> Policy:
    torch.manual_seed(0)
    network = randomized(weights.build_model(model))
    with torch.no_grad():  # Else an untrained π0-FAST writes the same token for all observations.
        for layer in network.layers():
            for parameter in layer.parameters():
                parameter *= 4
    return Policy(network, pipeline, num_steps=3 if model.denoises else None)


def _tokens_as_actions(pipeline: DataConfig) -> DataConfig:
    """Return a pipeline that takes tokens for numbers: random ones are hardly ever FAST actions."""

    def actions(data: Data) -> Data:
        return {"actions": np.asarray(data["actions"], np.float32)[:12].reshape(4, 3) / 300}

    return dataclasses.replace(
        pipeline,
        model_transforms=dataclasses.replace(pipeline.model_transforms, outputs=()),
        data_transforms=dataclasses.replace(pipeline.data_transforms, outputs=(actions,)),
    )


def observation(seed: int = 0, prompt: str = TASKS[0]) -> Data:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (2, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    state = random.uniform(-1, 1, len(JOINTS)).astype(np.float32)
    return {FRONT: images[0], WRIST: images[1], STATE: state, "prompt": prompt}


def record(folder: Path, tasks: tuple[str, ...] = TASKS[:2]) -> Path:
    """Write an episode of each task, with the gripper never moving, and return the folder."""
    states = np.stack([[observation(100 * i + j)[STATE] for j in range(EPISODE)] for i in range(9)])
    states[..., 2] = 0.5
    return write(folder, [(task, state, 2 * state) for task, state in zip(tasks, states)])


def write(folder: Path, episodes: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> Path:
    """Write episodes of a task, states and actions, with random images; return the folder."""
    camera = {"dtype": "image", "shape": (IMAGE_SIZE, IMAGE_SIZE, 3)}
    numbers = {"dtype": "float32", "shape": (len(JOINTS),), "names": list(JOINTS)}
    features = {FRONT: camera, WRIST: camera, STATE: numbers, ACTION: numbers}
    with Recorder(folder, FPS, features) as recorder:
        for episode, (task, states, actions) in enumerate(episodes):
            for step, (state, action) in enumerate(zip(states, actions, strict=True)):
                frame = observation(100 * episode + step) | {STATE: state, ACTION: action}
                del frame["prompt"]
                recorder.add_frame(frame, task=task)
            recorder.save_episode()
    return folder

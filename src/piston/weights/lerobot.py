"""LeRobot's policy folders: their config.json, and the statistics in their processors.

    config.json                                 the model, its features and how they are normalised
    policy_preprocessor.json                    the steps from an observation to the model
    policy_preprocessor_step_<n>_….safetensors  the statistics of its step `normalizer_processor`
    policy_postprocessor.json, …                the way back: the statistics of the actions

The names of the fields of config.json are in `configs`, those of the tensors in `pytorch_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from piston.files import write_json
from piston.models.configs import ModelConfig
from piston.transforms.normalize import NormStats
from piston.weights.configs import CONFIG, FAMILIES, IMAGES, LEROBOT_NAMES, foreign_fields
from piston.weights.tensors import (
    CheckpointError,
    read_object,
    read_tensor_file,
    write_tensor_file,
)

Step = tuple[str, Any]  # the name under which LeRobot registers it, and its options

PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
_NORMALIZER, _UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
# Our key → LeRobot's, and the kind of feature.
_FEATURES = {"state": ("observation.state", "STATE"), "actions": ("action", "ACTION")}
_MODES = {"MEAN_STD": False, "QUANTILES": True}
_DEVICE = ("device_processor", {"device": "cpu", "float_dtype": None})
_PALIGEMMA = "google/paligemma-3b-pt-224"
_FAST_PROMPT = 200  # LeRobot's usual length for π0-FAST; ours includes the action tokens


def write_policy_files(
    folder: Path,
    config: ModelConfig,
    norm_stats: Mapping[str, NormStats],
    *,
    use_quantiles: bool,
    floor: float = 0.0,
) -> None:
    """Write config.json and the processors; without statistics these normalise nothing.

    `floor` is that of the normalisation (see `Normalize`), which LeRobot has only in the numbers.
    """
    type_ = FAMILIES[config.family]
    dims = {key: stats.dim for key, stats in norm_stats.items()}
    features = {
        name: {"type": kind, "shape": [dims.get(key, config.action_dim)]}
        for key, (name, kind) in _FEATURES.items()
    }
    shape = [3, config.image_size, config.image_size]
    images = {IMAGES + camera: {"type": "VISUAL", "shape": shape} for camera in config.cameras}
    outputs = {"action": features.pop("action")}
    mode = "QUANTILES" if use_quantiles else "MEAN_STD"
    normalization = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    names = dict(LEROBOT_NAMES)
    if type_ == "pi0_fast":
        del names["max_token_len"]
    described = {
        "type": type_,
        "input_features": {**images, **features},
        "output_features": outputs,
        **foreign_fields(config, names),
        "n_action_steps": config.action_horizon,
        "max_state_dim": config.action_dim,
        "image_resolution": shape[1:],
        "normalization_mapping": normalization,
    }
    write_json(folder / CONFIG, described, indent=4)
    statistics = _tensors(norm_stats, floor)
    common = {"eps": 1e-8, "norm_map": normalization}
    normalize = (_NORMALIZER, {**common, "features": {**images, **features, **outputs}})
    unnormalize = (_UNNORMALIZER, {**common, "features": outputs})
    steps = _input_steps(config, type_, normalize, dims.get("state", config.action_dim))
    _write_processor(folder, PREPROCESSOR, steps, statistics)
    _write_processor(folder, _POSTPROCESSOR, [unnormalize, _DEVICE], statistics)


def _input_steps(config: ModelConfig, type_: str, normalize: Step, state_dim: int) -> list[Step]:
    """Return the steps of LeRobot's preprocessor of this family: registered names and options."""
    tokenize = {
        "max_length": _FAST_PROMPT if type_ == "pi0_fast" else config.prompt_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": _PALIGEMMA,
    }
    first: list[Step] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
    ]
    if type_ == "pi0":
        text: list[Step] = [("pi0_new_line_processor", {}), ("tokenizer_processor", tokenize)]
        return [*first, *text, _DEVICE, normalize]
    # LeRobot pads the state to `max_state_dim` before it is written into the prompt, openpi and
    # Piston after that: no padding keeps the prompt that the model was trained with.
    state = (f"{type_}_prepare_state_tokenizer_processor_step", {"max_state_dim": state_dim})
    steps = [*first, normalize, state, ("tokenizer_processor", tokenize)]
    if type_ == "pi0_fast":
        fast = {"action_tokenizer_name": "physical-intelligence/fast", "max_action_tokens": 256}
        steps.append(("action_tokenizer_processor", fast))
    return [*steps, _DEVICE]


def _tensors(norm_stats: Mapping[str, NormStats], floor: float) -> dict[str, torch.Tensor]:
    """Return the statistics under LeRobot's names, with the floor applied."""
    found = {}
    for key, stats in norm_stats.items():
        if key not in _FEATURES:
            continue
        values = {"mean": stats.mean, "std": np.maximum(stats.std, floor)}
        if stats.q01 is not None and stats.q99 is not None:
            values |= {"q01": stats.q01, "q99": np.maximum(stats.q99, stats.q01 + 2 * floor)}
        for name, value in values.items():
            found[f"{_FEATURES[key][0]}.{name}"] = torch.tensor(value, dtype=torch.float32)
    return found


def _write_processor(
    folder: Path,
    name: str,
    steps: list[Step],
    statistics: Mapping[str, torch.Tensor],
) -> None:
    rows: list[dict[str, Any]] = []
    for index, (registered, options) in enumerate(steps):
        rows.append({"registry_name": registered, "config": options})
        if registered in (_NORMALIZER, _UNNORMALIZER) and statistics:
            rows[-1]["state_file"] = file = f"{name}_step_{index}_{registered}.safetensors"
            write_tensor_file(folder / file, statistics)
    write_json(folder / f"{name}.json", {"name": name, "steps": rows}, indent=2)


def read_statistics(folder: Path) -> tuple[dict[str, NormStats], bool] | None:
    """Read the statistics of a policy folder, and whether it normalises by quantiles.

    None if the folder has no preprocessor, or one without statistics, as base models have.
    """
    path = folder / f"{PREPROCESSOR}.json"
    if not path.is_file():
        return None
    try:
        steps = {step["registry_name"]: step for step in read_object(path)["steps"]}
        step = steps.get(_NORMALIZER, {})
        file, modes = step.get("state_file"), step.get("config", {}).get("norm_map", {})
        if file is None:
            return None
        if Path(file).name != file:
            raise ValueError(f"the state_file {file!r} is not beside it")
        tensors = {n: e.read().numpy() for n, e in read_tensor_file(folder / file).items()}
        found, used = {}, set()
        for key, (name, kind) in _FEATURES.items():
            parts = ("mean", "std", "q01", "q99")
            values = {p: tensors[f"{name}.{p}"] for p in parts if f"{name}.{p}" in tensors}
            if values:
                found[key], mode = NormStats(**values), modes.get(kind, "IDENTITY")
                used.add(mode)
        if used and (len(used) > 1 or not used <= _MODES.keys()):
            raise ValueError(
                f"it normalises by {' and '.join(sorted(used))}; known are {', '.join(_MODES)}, "
                "the same for states and actions"
            )
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} does not describe a normalisation that can be read ({reason})."
        ) from error
    return (found, _MODES[used.pop()]) if found else None

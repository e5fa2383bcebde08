"""What the `config.json` beside foreign tensors says, in our words.

It is openpi's, LeRobot's, or the plain list of sizes that comes with reference cases.

Only what the tensors cannot show: heads, horizon, prompt length, precision, cameras. Settings of
training or of the robot are left alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piston.models.variants import GemmaSize, LoRA, VisionSize
from piston.weights.errors import CheckpointError

_FAMILIES = ("pi0", "pi05", "pi0_fast")
_IMAGES = "observation.images."
_PRECISIONS = ("float32", "bfloat16")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is an error that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}). It is damaged; fetch or write it again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object.")
    return data


def read_declared(folder: Path) -> dict[str, Any]:
    """Fields of our configurations; empty where there is no such file or it is of another kind."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    data = read_json(path)
    if data.get("type") in _FAMILIES:
        declared = _from_lerobot(data)
    elif data.get("model") in _FAMILIES and isinstance(data.get("vision"), dict):
        declared = _from_sizes(data, path)
    elif "paligemma_variant" in data:
        declared = _from_openpi(data)
    else:
        return {}
    if declared.get("dtype") not in _PRECISIONS:
        declared.pop("dtype", None)
    return {name: value for name, value in declared.items() if value is not None}


def _from_sizes(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The plain list: every part with all its sizes, adapters in a list of their own."""
    adapters = data.get("lora") or {}

    def expert(name: str) -> GemmaSize:
        lora = LoRA(**adapters[name]) if name in adapters else None
        return GemmaSize(**data[name], lora=lora)

    same = ("action_dim", "action_horizon", "max_token_len", "max_decoding_steps")
    try:
        return {
            **{name: data.get(name) for name in same},
            "vision": VisionSize(**data["vision"]),
            "vlm": expert("vlm"),
            "action_expert": expert("expert") if "expert" in data else None,
            "cameras": tuple(data["image_keys"]) if "image_keys" in data else None,
        }
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} lists the sizes of a {data['model']} model, but not as expected: {error}. "
            "Correct it, or take it away and give the model's configuration."
        ) from error


def _from_openpi(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "action_dim": data.get("action_dim"),
        "action_horizon": data.get("action_horizon"),
        "max_token_len": data.get("max_token_len"),
        "discrete_state_input": data.get("discrete_state_input"),
        "dtype": data.get("precision"),
        "vlm": data.get("paligemma_variant"),
        "action_expert": data.get("action_expert_variant"),
    }


def _from_lerobot(data: dict[str, Any]) -> dict[str, Any]:
    cameras = tuple(
        name.removeprefix(_IMAGES)
        for name, feature in (data.get("input_features") or {}).items()
        if name.startswith(_IMAGES) and feature.get("type") == "VISUAL"
    )
    fast = data["type"] == "pi0_fast"
    return {
        "action_dim": data.get("max_action_dim"),
        "action_horizon": data.get("chunk_size"),
        # For π0-FAST ours counts the action tokens too, LeRobot's does not.
        "max_token_len": None if fast else data.get("tokenizer_max_length"),
        "dtype": data.get("dtype"),
        "cameras": cameras or None,
        "vlm": data.get("paligemma_variant"),
        "action_expert": data.get("action_expert_variant"),
    }

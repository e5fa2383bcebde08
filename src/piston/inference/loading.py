"""Load a policy from a checkpoint: configuration, statistics, tensors.

A folder that the trainer wrote is self-contained. Any other checkpoint holds only a model, so that
a preset has to say which robot it is for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from piston import assets, presets, weights
from piston.config import TRAIN_SECTION, DataConfig, DataConfigFactory, TrainConfig, UnknownRobot
from piston.files import read_json_object
from piston.inference import exported
from piston.inference.compiled import (
    Buckets,
    GraphEngine,
    camera_counts,
    compile_graphs,
    usual_steps,
)
from piston.inference.packing import prepare_for_inference, quantizer
from piston.inference.policy import Policy
from piston.models.configs import GEMMA, VISION, Dtype
from piston.models.lora import merge_adapters
from piston.models.model import Model
from piston.robots import RobotInputs
from piston.robots.description import DescribedRobotDataConfig, with_robot
from piston.robots.image_text import ImageTextDataConfig
from piston.transforms.normalize import read_norm_stats

PolicyDtype = Literal["float32", "bfloat16", "int8"]

# What matrices are held in. Eight-bit matrices are made from bfloat16 ones, so that the float32
# model never has to fit in memory; activations are float32 then.
_HELD = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


def load_policy(location: str | Path, **options: Any) -> Policy:
    """The policy of a checkpoint's folder or location, for one robot.

    `options` are those of `load_policies`. A checkpoint that was trained with several robots needs
    the name of one: `robot="aloha"`.
    """
    policies = load_policies(location, **options)
    if len(policies) > 1:
        raise UnknownRobot(
            f"{location} was trained with several robots. Name one of {', '.join(policies)} "
            "(--robot)."
        )
    return next(iter(policies.values()))


class PolicyParts(NamedTuple):
    """A model and its robots by their names; the name of a single robot is empty."""

    model: Model
    configs: dict[str, TrainConfig]
    pipelines: dict[str, DataConfig]

    def buckets(self, max_batch: int) -> Buckets:
        """Return the shapes that the robots can send, for batches of up to `max_batch`."""
        config, robots = self.model.config, (one.robot_metadata for one in self.pipelines.values())
        return Buckets.of(config, camera_counts(robots, config), max_batch)

    def compiled(self, num_steps: int | None, max_batch: int) -> GraphEngine:
        """Return graphs for so many denoising steps; None: as many as the model was made for."""
        steps = num_steps or usual_steps(self.model)
        graphs, device = compile_graphs(self.model, steps), next(self.model.parameters()).device
        return GraphEngine(self.model, graphs, self.buckets(max_batch), steps, device=device)

    def policies(self, engine: GraphEngine | None, **options: Any) -> dict[str, Policy]:
        return {
            name: Policy(
                *(self.model, self.pipelines[name]),
                metadata=config.policy_metadata,
                engine=engine,
                **options,
            )
            for name, config in self.configs.items()
        }


def load_policies(
    location: str | Path,
    *,
    preset: str | TrainConfig | None = None,
    robot: RobotInputs | str | None = None,
    device: str | torch.device | None = None,
    dtype: PolicyDtype | None = None,
    default_prompt: str | None = None,
    default_robot: str | None = None,
    compile: bool = False,
    max_batch: int = 1,
    num_steps: int | None = None,
    **options: Any,
) -> dict[str, Policy]:
    """The policies of a checkpoint by the names of its robots; they share one model.

    The name of a single robot is empty. `dtype` None holds and computes as the checkpoint says.
    `preset` is for checkpoints without a configuration of their own, such as foreign ones. `robot`
    is the name of one of several robots; a description replaces the preset's robot, or the keys of
    the checkpoint's own. A `default_robot` that the checkpoint does not have is an error. `compile`
    compiles the model for batches of up to `max_batch` when it warms up. A file that `piston
    export` wrote is compiled already. `num_steps` is what the checkpoint or file says, unless
    given. `options` are the policy's: candidates, seed, rtc_jacobian, subtask_interval.
    """
    if max_batch != 1 and not compile:
        raise ValueError("max_batch is for compiled policies: set compile=True, or leave it out.")
    chosen: dict[str, Any] = {
        "robot": robot,
        "default_prompt": default_prompt,
        "default_robot": default_robot,
    }
    if is_exported(location):
        if preset is not None or dtype is not None or compile:
            raise ValueError(
                f"{location} is compiled, with its robot and its dtype: leave out --preset, "
                "--dtype and --compile."
            )
        parts, engine = _load_exported(location, device=device, **chosen)
        if num_steps not in (None, engine.num_steps):
            raise ValueError(
                f"{location} is compiled for {engine.num_steps} denoising steps, not {num_steps}. "
                "Leave out --num-steps, or export the checkpoint with that number."
            )
        return parts.policies(engine, **options)
    parts = load_parts(location, preset=preset, device=device, dtype=dtype, **chosen)
    if compile:
        return parts.policies(parts.compiled(num_steps, max_batch), num_steps=num_steps, **options)
    prepare_for_inference(parts.model)
    return parts.policies(None, num_steps=num_steps, **options)


def is_exported(location: str | Path) -> bool:
    """Whether a location is that of a compiled file, by its name."""
    return str(location).endswith(exported.SUFFIX)


def export_policy(
    location: str | Path,
    file: Path,
    *,
    num_steps: int | None = None,
    max_batch: int = 8,
    **options: Any,
) -> None:
    """Compile a checkpoint into one file, for this machine. `options` are those of `load_parts`."""
    parts = load_parts(location, **options)
    steps = num_steps or usual_steps(parts.model)
    exported.export(file, *parts, parts.buckets(max_batch), steps)


def _load_exported(
    location: str | Path,
    *,
    robot: RobotInputs | str | None,
    device: str | torch.device | None,
    default_prompt: str | None,
    default_robot: str | None,
) -> tuple[PolicyParts, GraphEngine]:
    if isinstance(robot, RobotInputs):
        raise ValueError(f"{location} contains its robot: leave out --robot FILE.")
    file = assets.resolve(location)
    found = exported.load(file, None if device is None else _usable_device(device))
    known = {name or one.config.data.robot: name for name, one in found.robots.items()}
    for name in (robot, default_robot):
        if name is not None and name not in known:
            raise UnknownRobot.named(name, known)
    robots = found.robots if robot is None else {known[robot]: found.robots[known[robot]]}
    configs = {name: _with_prompt(one.config, default_prompt) for name, one in robots.items()}
    pipelines = {
        name: dataclasses.replace(
            configs[name].data_config(),
            norm_stats=one.norm_stats,
            use_quantile_norm=one.use_quantile_norm,
            entry=name,
        )
        for name, one in robots.items()
    }
    return PolicyParts(found.model, configs, pipelines), found.engine


def load_parts(
    location: str | Path,
    *,
    preset: str | TrainConfig | None = None,
    robot: RobotInputs | str | None = None,
    device: str | torch.device | None = None,
    dtype: PolicyDtype | None = None,
    default_prompt: str | None = None,
    default_robot: str | None = None,
) -> PolicyParts:
    """Load the model of a checkpoint, and the pipelines of its robots, as `load_policies` does."""
    device = _usable_device(device)
    if dtype is not None and dtype not in _HELD:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(_HELD)}.")
    if dtype == "int8" and device.type != "cpu":
        raise ValueError(f"int8 is for CPUs, the device is {device}. Use bfloat16 there.")
    folder = assets.resolve(location)
    config = find_config(folder, preset)
    # The slot in which all robots of a mixture show the picture of a question.
    entries = config.data.entries.values()
    slot = next((one.slot for one in entries if isinstance(one, ImageTextDataConfig)), None)
    if isinstance(robot, RobotInputs):
        config = with_robot(config, robot) if preset else _with_keys(config, robot)
    if preset is not None:
        config = _with_own_metadata(config, folder)
    each = _robot_configs(config, robot if isinstance(robot, str) else None, default_prompt)
    known = [name or config.data.robot for name, config in each.items()]
    if default_robot is not None and default_robot not in known:  # before the weights are read
        raise UnknownRobot.named(default_robot, known)
    if dtype is not None:
        computed: Dtype = "float32" if dtype == "int8" else dtype
        for name, config in each.items():
            model_config = dataclasses.replace(config.model, dtype=computed)
            each[name] = dataclasses.replace(config, model=model_config)
    pipelines = {
        name: dataclasses.replace(
            _with_statistics(config.data_config(), folder, config.name),
            entry=name,
            question_slot=slot,
        )
        for name, config in each.items()
    }
    first = next(iter(each.values()))
    model = weights.load_model(
        folder,
        first.model,
        dtype=None if dtype is None else _HELD[dtype],
        device=device,
        replace=quantizer(first.model) if dtype == "int8" else None,
    )
    if dtype == "int8":
        merge_adapters(model)  # those of the configuration: the weights are merged already
    return PolicyParts(model, each, pipelines)


def _robot_configs(
    config: TrainConfig, robot: str | None, default_prompt: str | None
) -> dict[str, TrainConfig]:
    """Return the configuration of every robot that is asked for, as if it were the only one."""
    if "" in config.data.entries:
        if robot is not None and robot.lower() != config.data.robot.lower():
            raise UnknownRobot(f"The checkpoint is of {config.data.robot}, not of {robot!r}.")
        return {"": _with_prompt(config, default_prompt)}
    names = config.robots if robot is None else [robot]
    return {name: _with_prompt(config.for_robot(name), default_prompt) for name in names}


def random_policy(
    preset: str | TrainConfig,
    *,
    robot: RobotInputs | str | None = None,
    default_prompt: str | None = None,
    compile: bool = False,
    max_batch: int = 1,
    num_steps: int | None = None,
    **options: Any,
) -> Policy:
    """Return a tiny model with random weights and the preset's robot, to test what is around it.

    Further options are those of `load_policies`.
    """
    config = presets.get(preset) if isinstance(preset, str) else preset
    if isinstance(robot, str):
        config = config.for_robot(robot)
    elif robot is not None:
        config = with_robot(config, robot)
    elif "" not in config.data.entries:
        known = ", ".join(config.robots)
        raise UnknownRobot(f"{config.name} is of several robots: name one of {known}.")
    config = _with_prompt(config, default_prompt)
    small: dict[str, Any] = {"vision": VISION["dummy"], "vocab_size": 4_096, "image_size": 224}
    small |= dict.fromkeys(config.model.experts, GEMMA["dummy"])
    model_config = dataclasses.replace(config.model, **small, tokenizer="bytes", dtype="float32")
    pipeline = dataclasses.replace(config, model=model_config).data_config()
    if pipeline.fake:
        raise ValueError(
            f"Preset {config.name!r} has no robot, so that no observation fits it. "
            "Name one with a robot, such as pi0_aloha_sim."
        )
    # No statistics: the model's numbers mean nothing anyway.
    entry = robot if isinstance(robot, str) else ""
    pipeline = dataclasses.replace(pipeline, norm_stats={}, entry=entry)
    model = weights.build_model(model_config)
    parts = PolicyParts(model, {"": config}, {"": pipeline})
    engine = parts.compiled(num_steps, max_batch) if compile else None
    return parts.policies(engine, num_steps=num_steps, **options)[""]


def _with_keys(config: TrainConfig, robot: RobotInputs) -> TrainConfig:
    """Return a trained checkpoint's configuration with other keys for the same numbers."""
    if not isinstance(config.data, DescribedRobotDataConfig):
        raise ValueError(
            f"The checkpoint is of {config.data.robot}, which no file describes: leave out --robot."
        )
    trained = config.data.table
    for name in ("state_names", "action_names", "relative", "grippers"):
        found, expected = getattr(robot, name), getattr(trained, name)
        if found != expected:
            raise ValueError(
                f"--robot has {name} {found}, the checkpoint was trained with {expected}. Only "
                "keys, cameras, prompt and rate may differ. Without --robot, the checkpoint's own "
                "description is used."
            )
    return dataclasses.replace(config, data=dataclasses.replace(config.data, description=robot))


def _with_prompt(config: TrainConfig, default_prompt: str | None) -> TrainConfig:
    if default_prompt is None:
        return config
    assert isinstance(config.data, DataConfigFactory)
    data = dataclasses.replace(config.data, default_prompt=default_prompt)
    return dataclasses.replace(config, data=data)


def _usable_device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"There is no device {device!r}: {error}") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"The device is {device!r}, but torch finds no GPU here. Use cpu.")
    return chosen


def find_config(
    folder: Path,
    preset: str | TrainConfig | None = None,
    advice: str = "Name a preset (--preset pi0_aloha); `piston presets` lists them.",
) -> TrainConfig:
    """Return the given preset, else the configuration that the trainer wrote with the tensors.

    `advice` is what to do if there is neither.
    """
    if preset is not None:
        return presets.get(preset) if isinstance(preset, str) else preset
    path = folder / "config.json"
    section = read_json_object(path).get(TRAIN_SECTION) if path.is_file() else None
    steps = sorted(int(child.name) for child in folder.glob("[0-9]*") if child.name.isdecimal())
    if section is None and steps and not path.is_file():
        raise ValueError(
            f"{folder} is a run, not one of its checkpoints. Its newest is "
            f"{folder / str(steps[-1])}."
        )
    if section is None and (folder / "run.json").is_file() and not path.is_file():
        raise ValueError(
            f"{folder} is a run that has no checkpoint yet. Continue it with `piston train … "
            "--resume`."
        )
    if section is None:
        raise ValueError(f"{folder} holds a model but does not say which robot it is for. {advice}")
    return presets.train_config_from_json(section, f"{path}: {TRAIN_SECTION}")


def _with_own_metadata(preset: TrainConfig, folder: Path) -> TrainConfig:
    """Return a preset with the metadata of a checkpoint of the same robot, where it says nothing.

    Among them are the limits of the actions, which are in the robot's own units.
    """
    try:
        own = find_config(folder, None)
    except ValueError:  # it has no configuration, or one that is not known here
        return preset
    robots = [(type(one), getattr(one, "description", None)) for one in (own.data, preset.data)]
    if robots[0] != robots[1]:
        return preset
    metadata = {**(own.policy_metadata or {}), **(preset.policy_metadata or {})}
    return dataclasses.replace(preset, policy_metadata=metadata)


def _with_statistics(data: DataConfig, folder: Path, preset: str) -> DataConfig:
    """Return the data configuration with the checkpoint's statistics, else with its own."""
    # `params` of the JAX trainer lies beside its assets.
    for place in (folder, folder.parent):
        found = {path.parent for path in (place / "assets").glob("**/norm_stats.json")}
        named = found if data.asset_id is None else found & {place / "assets" / data.asset_id}
        if len(named) == 1:
            return dataclasses.replace(data, norm_stats=read_norm_stats(named.pop()))
    if (theirs := weights.read_statistics(folder)) is not None:  # of a LeRobot policy
        norm_stats, quantiles = theirs
        return dataclasses.replace(data, norm_stats=norm_stats, use_quantile_norm=quantiles)
    return data.with_norm_stats(preset)

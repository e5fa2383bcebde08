"""`piston presets [NAME]`: all named configurations as a table, or one in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.tree import Tree

from piston import presets
from piston.cli.command import Command, named
from piston.cli.console import console, table
from piston.config import DataConfig, TrainConfig
from piston.models.configs import GemmaSize, VisionSize, size_name
from piston.robots.description import read_robot, with_robot
from piston.transforms import Transform


def _presets(
    name: Annotated[str | None, tyro.conf.Positional, named("[NAME]")] = None,
    /,
    robot: Path | None = None,
) -> None:
    """List the presets, or show one in full with its transform chain.

    Args:
        name: The preset to show.
        robot: A file that describes a robot, in place of the preset's.
    """
    if name is None:
        columns = ("name", "model", "horizon", "robot", "data", "steps", "for")
        rows = map(_row, map(presets.get, presets.names()))
        numbers, drop = ("horizon", "steps"), ("data", "horizon", "steps")
        console().print(table(columns, rows, title="Presets", right=numbers, drop=drop))
        return
    preset = presets.get(name)
    if robot is not None:
        preset = with_robot(preset, read_robot(robot))
    tree = Tree(f"[bold]{preset.name}[/bold]")
    _add_fields(tree, preset)
    console().print(tree)
    try:
        pipelines = preset.pipelines()
    except ValueError as error:  # the preset is for a robot that --robot describes
        console().print(escape(str(error)))
        return
    for data in pipelines:
        if not data.is_extra:
            console().print(_chain(data))


def _row(preset: TrainConfig) -> tuple[str, ...]:
    model, purpose = preset.model, presets.purpose(preset)
    steps = f"{preset.num_train_steps:,}" if purpose == "training" else "–"
    names = [one.repo_id for one in preset.data.entries.values()]
    data = ", ".join(name for name in names if name is not tyro.MISSING)
    if not data:
        data = "yours: --data.repo-id" if purpose == "training" else "–"
    lora = " LoRA" if model.vlm.lora else ""
    kind, horizon = f"{model.family}{lora}", str(model.action_horizon)
    return preset.name, kind, horizon, preset.data.robot, data, steps, purpose


def _add_fields(tree: Tree, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, GemmaSize | VisionSize):
            tree.add(f"{field.name} = {size_name(value)}")
        elif dataclasses.is_dataclass(value):
            _add_fields(tree.add(f"{field.name}: {type(value).__name__}"), value)
        elif isinstance(value, Mapping) and any(map(dataclasses.is_dataclass, value.values())):
            for name, one in value.items():
                _add_fields(tree.add(f"{name}: {type(one).__name__}"), one)
        elif value is tyro.MISSING:
            tree.add(f"{field.name} = [yellow](yours to set)[/yellow]")
        else:
            tree.add(escape(f"{field.name} = {value!r}"), highlight=True)


def _chain(data: DataConfig) -> Tree:
    """Normalisation is shown without its numbers, so that no statistics are needed."""
    tree = Tree(f"[bold]transform chain{f' of {data.entry}' if data.entry else ''}[/bold]")
    if data.fake:
        tree.add("none: random samples in the model's own shapes")
        return tree
    how = "quantiles q01…q99 → −1…1" if data.use_quantile_norm else "(x − mean) / std"
    source = f"{data.assets_dir}/{data.asset_id}/norm_stats.json"
    robot, model = data.data_transforms, data.model_transforms
    directions: dict[str, dict[str, Sequence[Transform] | None]] = {
        "from the data set to the model": {
            "repack (training only)": data.repack_transforms.inputs,
            "data transforms": robot.inputs,
            **({f"Normalize: {how}   [dim]{source}[/dim]": None} if data.has_actions else {}),
            "model transforms": model.inputs,
        },
        "from the model to the robot": {
            "model transforms": model.outputs,
            **({"Unnormalize": None} if data.has_actions else {}),
            "data transforms": robot.outputs,
        },
    }
    for direction, stages in directions.items():
        branch = tree.add(direction)
        for stage, transforms in stages.items():
            listed = branch.add(stage)
            for transform in transforms or ():
                listed.add(escape(repr(transform)), highlight=True)
            if transforms is not None and not transforms:
                listed.add("[dim]none[/dim]")
    return tree


run_presets = Command("presets", _presets)

"""`piston presets [NAME]`: all named configurations as a table, or one in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.tree import Tree

from piston import presets
from piston.cli.console import console, table
from piston.config import DataConfig, TrainConfig
from piston.models.configs import GemmaSize, ModelConfig, VisionSize, size_name
from piston.transforms import Transform


def run_presets(args: list[str]) -> None:
    tyro.cli(_presets, args=args, prog="piston presets")


def _presets(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the presets, or show one in full with its transform chain.

    Args:
        name: The preset to show.
    """
    if name is None:
        columns = ("name", "model", "robot", "data", "steps", "for")
        rows = map(_row, map(presets.get, presets.names()))
        console().print(table(columns, rows, title="Presets", right=("steps",)))
    else:
        show(presets.get(name))


def _row(preset: TrainConfig) -> tuple[str, ...]:
    purpose = presets.purpose(preset)
    return (
        preset.name,
        _model_cell(preset.model),
        preset.data.robot,
        _data_cell(preset),
        f"{preset.num_train_steps:,}" if purpose == "training" else "–",
        purpose,
    )


def _model_cell(model: ModelConfig) -> str:
    lora = " LoRA" if model.vlm.lora else ""
    return f"{model.family}{lora}, horizon {model.action_horizon}"


def _data_cell(preset: TrainConfig) -> str:
    if preset.data.repo_id is not tyro.MISSING:
        return preset.data.repo_id
    return "yours: --data.repo-id" if presets.purpose(preset) == "training" else "–"


def show(preset: TrainConfig) -> None:
    """Print all fields of a preset and its transforms in the order in which they are applied."""
    screen = console()
    tree = Tree(f"[bold]{preset.name}[/bold]")
    _add_fields(tree, preset)
    screen.print(tree)
    screen.print(_chain(preset.data_config()))


def _add_fields(tree: Tree, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, GemmaSize | VisionSize):
            tree.add(f"{field.name} = {size_name(value)}")
        elif dataclasses.is_dataclass(value):
            _add_fields(tree.add(f"{field.name}: {type(value).__name__}"), value)
        elif value is tyro.MISSING:
            tree.add(f"{field.name} = [yellow](yours to set)[/yellow]")
        else:
            tree.add(escape(f"{field.name} = {value!r}"), highlight=True)


def _chain(data: DataConfig) -> Tree:
    """Normalisation is shown without its numbers, so that no statistics are needed."""
    tree = Tree("[bold]transform chain[/bold]")
    how = "quantiles q01…q99 → −1…1" if data.use_quantile_norm else "(x − mean) / std"
    source = f"{data.assets_dir}/{data.asset_id}/norm_stats.json"
    if data.fake:
        tree.add("none: random samples in the model's own shapes")
        return tree
    inputs = tree.add("from the data set to the model")
    _add_transforms(inputs.add("repack (training only)"), data.repack_transforms.inputs)
    _add_transforms(inputs.add("data transforms"), data.data_transforms.inputs)
    inputs.add(f"Normalize: {how}   [dim]{source}[/dim]")
    _add_transforms(inputs.add("model transforms"), data.model_transforms.inputs)
    outputs = tree.add("from the model to the robot")
    _add_transforms(outputs.add("model transforms"), data.model_transforms.outputs)
    outputs.add("Unnormalize")
    _add_transforms(outputs.add("data transforms"), data.data_transforms.outputs)
    return tree


def _add_transforms(tree: Tree, transforms: Iterable[Transform]) -> None:
    transforms = list(transforms)
    for transform in transforms:
        tree.add(escape(repr(transform)), highlight=True)
    if not transforms:
        tree.add("[dim]none[/dim]")

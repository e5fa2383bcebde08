"""`piston train PRESET`, `piston stats PRESET`, and `piston distill CHECKPOINT`.

They take a preset, or a checkpoint's own configuration, and overrides of its options.

`piston train` and `piston distill` end with 0 after the last step; with 130 or 143 when Ctrl-C or
SIGTERM stopped them, everything saved; with 1 after an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import math
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import numpy as np
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from piston import presets
from piston.cli.command import parse as parse_words
from piston.cli.console import UsageError, console, fail, table
from piston.config import (
    CosineDecaySchedule,
    DataConfig,
    LRSchedule,
    RsqrtDecaySchedule,
    TrainConfig,
)
from piston.models.configs import Pi0Config
from piston.older_configs import FIELDS, Renamed
from piston.progress import ProgressBar
from piston.robots import RobotInputs
from piston.robots.description import read_robot, with_robot
from piston.transforms.normalize import constant_dimensions, write_norm_stats

if TYPE_CHECKING:
    from rich.table import Table

    from piston.data.protocol import Dataset
    from piston.data.statistics import KeyStatistics

SCHEDULES: dict[str, type[LRSchedule]] = {
    "cosine": CosineDecaySchedule,
    "rsqrt": RsqrtDecaySchedule,
}
_SCHEDULE_HELP = {
    "kind": "The kind of the schedule.",
    "warmup_steps": "Steps of linear warm-up.",
    "peak_lr": "The learning rate reached after the warm-up.",
    "decay_steps": "The step (counted from the start) at which decay_lr is reached (cosine).",
    "decay_lr": "The learning rate from then on (cosine).",
    "timescale": "Steps after which the rate has fallen to peak/√2 (rsqrt).",
}
BARS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24
REGISTRY = ConstructorRegistry()


def run_train(args: list[str]) -> int:
    return _train(lambda: parse(args))


def run_distill(args: list[str]) -> int:
    return _train(lambda: parse_distilled(args))


def _train(parse: Callable[[], TrainConfig]) -> int:
    is_first = int(os.environ.get("RANK", 0)) == 0
    if not is_first:  # the first process of torchrun logs for all of them
        logging.getLogger().setLevel(logging.WARNING)
    config = parse()
    from piston.training.loop import TrainingStopped, train_loop  # imports torch

    try:
        checkpoint = train_loop(config)
    except TrainingStopped as stopped:
        return fail(str(stopped), code=stopped.exit_code)
    if is_first:
        served = shlex.quote(str(checkpoint))
        print(f"Done. Serve it with: piston serve {served}", file=sys.stderr)
    return 0


@dataclasses.dataclass(frozen=True)
class TrainArguments:
    """Train a preset's model on a data set, from the start or with --resume."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    # A file that describes the robot (`piston init-robot` writes one), in place of the preset's.
    robot: Path | None = None


def parse(args: Sequence[str]) -> TrainConfig:
    """Return a preset with overrides of any of its fields: `pi0_aloha --batch-size 10`."""
    description = inspect.getdoc(TrainArguments) or ""
    arguments: TrainArguments = _parse("piston train", description, args, TrainArguments)
    return arguments.config


def _parse(
    prog: str, description: str, args: Sequence[str], make: Callable[[TrainConfig], Any]
) -> Any:
    """Parse the name of a preset and overrides of the fields of `make(preset)`."""
    for old, change in FIELDS.items():
        if not isinstance(change, Renamed):
            continue
        flag, now = old.replace("_", "-"), change.new.replace("_", "-")
        if any(re.fullmatch(rf"--(data\.)?{flag}(=.*)?", word.replace("_", "-")) for word in args):
            raise UsageError(f"The option {flag} of version 0.1.0 is named {now} now.")
    first, *others = args or ["--help"]
    if first in ("-h", "--help"):
        print(f"usage: {prog} PRESET [OPTIONS]\n\n{description}\n\npresets:")
        width = max(map(len, presets.names()))
        for name in presets.names():
            print(f"  {name:<{width}}  {_about(presets.get(name))}")
        print(f"\n`{prog} PRESET --help` lists the options.")
        raise SystemExit(0)
    if first.startswith("-"):
        raise UsageError(f"The preset comes first: {prog} PRESET {shlex.join(args)}")
    preset, robot = presets.get(first), _robot_given(args)
    if robot is not None:
        preset = with_robot(preset, robot)
    return _override(make(preset), others, f"{prog} {first}", f"{description}\n\n{_about(preset)}")


def _override(default: Any, words: Sequence[str], prog: str, description: str) -> Any:
    """Return a configuration with the options that the words give."""
    return parse_words(
        type(default),
        words,
        prog,
        default=default,
        description=description,
        registry=REGISTRY,
        config=(tyro.conf.AvoidSubcommands,),
    )


@dataclasses.dataclass(frozen=True)
class DistillArguments:
    """Teach a trained flow policy to denoise a chunk in one step, or in a few.

    It trains on the data of the checkpoint, with its own options and half of its steps and
    learning rate. Half of the samples of noise train ordinary denoising, so that ten steps still
    work; in the others one large step learns to lead where ten ordinary ones lead. Images and
    prompt are read by frozen weights.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]


def parse_distilled(args: Sequence[str]) -> TrainConfig:
    """Return the configuration that distils a checkpoint: `CHECKPOINT --exp-name NAME`."""
    description = inspect.getdoc(DistillArguments) or ""
    first, *others = args or ["--help"]
    if first.startswith("-"):
        if first in ("-h", "--help"):
            paragraphs = (textwrap.fill(part, 79) for part in description.split("\n\n"))
            print("usage: piston distill CHECKPOINT [OPTIONS]", *paragraphs, sep="\n\n")
            print("\n`piston distill CHECKPOINT --help` lists the options, those of train.")
            raise SystemExit(0)
        raise UsageError(f"The checkpoint comes first: piston distill DIR {shlex.join(args)}")
    from piston import assets
    from piston.inference.loading import find_config  # imports torch

    folder = assets.resolve(first)
    advice = "Fine-tune it with `piston train PRESET --weights …` first, and distil the result."
    default = DistillArguments(distilled(find_config(folder, advice=advice), folder))
    arguments: DistillArguments = _override(
        default, others, f"piston distill {first}", f"{description}\n\n{_about(default.config)}"
    )
    model = arguments.config.model
    if not isinstance(model, Pi0Config) or model.distilled_steps is None:
        raise ValueError("--model.distilled-steps is None: there would be nothing to learn.")
    return arguments.config


def distilled(config: TrainConfig, checkpoint: Path) -> TrainConfig:
    """Return how a checkpoint that was trained with `config` is distilled to one step."""
    model = config.model
    if not isinstance(model, Pi0Config):
        raise ValueError(f"{checkpoint} is a {model.family}, which does not denoise.")
    if model.distilled_steps is not None:
        raise ValueError(f"{checkpoint} was distilled already, to {model.distilled_steps} steps.")
    num_steps, schedule = max(1, config.num_train_steps // 2), config.lr_schedule
    warmup = schedule.warmup_steps // 2
    schedule = dataclasses.replace(schedule, peak_lr=schedule.peak_lr / 2, warmup_steps=warmup)
    if isinstance(schedule, CosineDecaySchedule):
        decay_steps = max(warmup + 1, schedule.decay_steps // 2)
        decay_lr = schedule.decay_lr / 2
        schedule = dataclasses.replace(schedule, decay_steps=decay_steps, decay_lr=decay_lr)
    # Adapters stay adapters: what they adapt is frozen.
    adapted = ("action_expert.*", "!action_expert.*lora*") if model.action_expert.lora else ()
    return dataclasses.replace(
        config,
        exp_name=tyro.MISSING,
        model=dataclasses.replace(model, distilled_steps=1),
        # The statistics are those that the checkpoint was trained with.
        data=config.data.with_assets(str(checkpoint.resolve() / "assets")),
        weights=str(checkpoint.resolve()),
        allow_missing=("suffix.time.target.*",),
        freeze=("vision.*", "vlm.*", *adapted),
        noise_draws=max(2, config.noise_draws),
        num_train_steps=num_steps,
        lr_schedule=schedule,
        resume=False,
        overwrite=False,
    )


def _about(preset: TrainConfig) -> str:
    return f"{preset.model.family} on {preset.data.robot} ({presets.purpose(preset)})"


def _robot_given(args: Sequence[str]) -> RobotInputs | None:
    """Return the robot of --robot: which options there are for the data depends on it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--robot", nargs="?")
    path = parser.parse_known_args(list(args))[0].robot
    return None if path is None else read_robot(path)


@REGISTRY.struct_rule
def _schedule_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """`--lr-schedule KIND`, and as `--lr-schedule.…` the fields of every kind.

    With another kind than the preset's, warm-up and peak stay the preset's.
    """
    before = info.default
    if not isinstance(before, LRSchedule):
        return None
    kind = next((name for name, known in SCHEDULES.items() if type(before) is known), None)
    # None stands for a schedule of the user's own.
    kinds = Annotated[
        Literal[(*SCHEDULES, *([None] if kind is None else []))], tyro.conf.arg(name="")
    ]
    fields: dict[str, tuple[Any, Any]] = {"kind": (kinds, kind)}
    for known in (*SCHEDULES.values(), type(before)):
        for name, hint in get_type_hints(known).items():
            has = hasattr(before, name)
            fields[name] = (hint, getattr(before, name)) if has else (hint | None, None)

    def make(kind: str | None, **values: Any) -> LRSchedule:
        chosen = type(before) if kind is None else SCHEDULES[kind]
        given = {name: v for name, v in values.items() if v != getattr(before, name, None)}
        usable = {field.name for field in dataclasses.fields(chosen)}
        for name in set(given) - usable:
            option = f"--lr-schedule.{name.replace('_', '-')}"
            raise ValueError(f"{option} is no option of the {kind or chosen.__name__} schedule.")
        if chosen is type(before):
            return dataclasses.replace(before, **given)
        shared = {"warmup_steps": before.warmup_steps, "peak_lr": before.peak_lr}
        return chosen(**{**shared, **given})

    specs = (
        StructFieldSpec(name=name, type=hint, default=default, helptext=_SCHEDULE_HELP.get(name))
        for name, (hint, default) in fields.items()
    )
    return StructConstructorSpec(instantiate=make, fields=tuple(specs))


@dataclasses.dataclass(frozen=True)
class StatsArguments:
    """Compute mean, std, q01 and q99 of states and actions.

    They are those after the robot's transforms. No image is read.

    They are written as norm_stats.json where the preset expects it.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    # Use a random choice of this many frames.
    max_frames: int | None = None
    # A file that describes the robot (`piston init-robot` writes one), in place of the preset's.
    robot: Path | None = None


def stats_arguments(preset: TrainConfig) -> StatsArguments:
    # A run's name, which statistics do not need.
    name = "stats" if preset.exp_name is tyro.MISSING else preset.exp_name
    return StatsArguments(dataclasses.replace(preset, exp_name=name))


def run_stats(args: list[str]) -> None:
    description = inspect.getdoc(StatsArguments) or ""
    arguments: StatsArguments = _parse("piston stats", description, args, stats_arguments)
    if arguments.max_frames is not None and arguments.max_frames < 1:
        raise ValueError(f"--max-frames is {arguments.max_frames}; expected at least 1.")
    from piston.data.pipeline import open_sources, split_sources
    from piston.data.view import select

    config = arguments.config
    pipelines = config.pipelines()
    for one in pipelines:
        if one.has_actions:
            _folder(config, one)  # an error comes before the work
    # The episodes that are trained on: without those that cannot be read or are held out.
    opened = open_sources(pipelines, config.model)
    parts = split_sources(pipelines, opened, config.validation_episodes, seed=config.seed)
    robots: dict[str, list[tuple[DataConfig, Dataset]]] = {}
    for one, dataset, (kept, _) in zip(pipelines, opened, parts):
        if one.has_actions:
            robots.setdefault(one.entry, []).append((one, select(dataset, kept)))
    for entry, sets in robots.items():
        if entry:
            console().rule(entry)
        _compute(config, sets, arguments.max_frames)


def _compute(
    config: TrainConfig,
    sets: Sequence[tuple[DataConfig, Dataset]],
    max_frames: int | None,
) -> None:
    """Compute, show and write the statistics of one robot's data sets together."""
    from piston.data.format import dimension_names
    from piston.data.open import keys_used
    from piston.data.statistics import TransformedColumns, compute_statistics
    from piston.data.view import features_of

    begun, (data_config, first) = time.monotonic(), sets[0]
    steps = data_config.steps_read(config.model.action_horizon)
    columns = [TransformedColumns(dataset, one, steps) for one, dataset in sets]
    num_all = sum(map(len, columns))
    num_frames = min(num_all, max_frames or num_all)
    with ProgressBar("statistics", "frames", num_frames) as bar:
        statistics = compute_statistics(columns, max_frames=max_frames, progress=bar.show)
    seconds = time.monotonic() - begun
    # Dimensions have the names that the data set declares.
    features = features_of(first)
    used = [features[key] for key in keys_used(data_config) or features if key in features]
    actions = [one for one in used if one.name in data_config.action_sequence_keys]
    state = [one for one in used if one not in actions and not one.is_camera]
    screen, warnings = console(), list[str]()
    for key, found in statistics.items():
        declared = {"actions": actions, "state": state}[key]
        names = dimension_names(declared, found.norm_stats.dim, otherwise=key)
        screen.print(_table(key, found, names))
        warnings += _warnings(key, found, names, data_config)
    for warning in warnings:
        screen.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    norm_stats = {key: found.norm_stats for key, found in statistics.items()}
    path = write_norm_stats(_folder(config, data_config), norm_stats)
    screen.print(
        f"{num_frames:,} of {num_all:,} frames in {seconds:.1f} s; "
        f"{_precision(num_frames, num_all)}. Written: {path}",
        highlight=False,
    )


def _folder(config: TrainConfig, data_config: DataConfig) -> Path:
    """Return the folder in which the preset looks for its statistics."""
    if data_config.fake:
        raise ValueError(f"{config.name} trains on random samples; they need no statistics.")
    if data_config.assets_dir is None or data_config.asset_id is None:
        flag = data_config.flag("assets.asset-id")
        raise ValueError(f"The statistics have no name: set {flag}.")
    if "://" in data_config.assets_dir:
        raise ValueError(
            f"{config.name} takes the statistics of {data_config.assets_dir}/"
            f"{data_config.asset_id}, which are there already. For statistics of your own, give "
            f"this and training {data_config.flag('assets.assets-dir')} {config.assets_dirs}"
        )
    return Path(data_config.assets_dir) / data_config.asset_id


def _precision(num_chosen: int, num_frames: int) -> str:
    """Describe how far the statistics may be from those of all frames."""
    if num_chosen >= num_frames:
        return "all values are counted, the statistics are exact"
    # Chosen without putting back: the closer to all of them, the smaller the error.
    share = math.sqrt((1 - num_chosen / num_frames) / num_chosen)
    rank = math.sqrt(0.01 * 0.99) * share
    return (
        f"of a random choice of {num_chosen:,} frames: one standard error of a mean is "
        f"{share:.2g} std, q01 is the quantile 0.01 ± {rank:.1g} and q99 0.99 ± {rank:.1g}"
    )


def _warnings(
    key: str, found: KeyStatistics, names: Sequence[str], config: DataConfig
) -> Iterator[str]:
    stats = found.norm_stats
    if dims := constant_dimensions({key: stats}, config.use_quantile_norm).get(key):
        listed = ", ".join(f"{names[dim]} (dimension {dim})" for dim in dims)
        advice = (
            f"the floor of {config.norm_floor:g} keeps their noise small."
            if config.norm_floor
            else "normalised, the slightest noise there explodes. Set "
            f"{config.flag('norm-floor')}, or leave them out."
        )
        yield f"{key}: {listed} never move{'s' * (len(dims) == 1)}; {advice}"
    q01, q99 = stats.quantiles
    for dim in found.far_outliers():
        yield (
            f"{key}: {names[dim]} has far outliers: {found.minimum[dim]:.4g} … "
            f"{found.maximum[dim]:.4g}, while 98 % lie in {q01[dim]:.4g} … {q99[dim]:.4g}."
        )


def _table(key: str, found: KeyStatistics, names: Sequence[str]) -> Table:
    stats, low, high = found.norm_stats, found.minimum, found.maximum
    q01, q99 = stats.quantiles
    columns = {"min": low, "q01": q01, "mean": stats.mean, "std": stats.std, "q99": q99}
    columns["max"] = high
    rows = []
    for dim, name in enumerate(names):
        numbers = (f"{values[dim]:.4g}" for values in columns.values())
        rows.append([name, *numbers, histogram(found.sample[dim], low[dim], high[dim])])
    title = f"{key}: {found.count:,} values per dimension"
    drop = ("histogram", "min", "max")
    return table(("", *columns, "histogram"), rows, title=title, right=columns, drop=drop)


def histogram(values: np.ndarray, low: float, high: float) -> str:
    """Blocks from `low` to `high`; a bin with any value at all shows at least the lowest."""
    if not high > low:
        return BARS[-1]
    counts, _ = np.histogram(np.clip(values.astype(np.float64), low, high), NUM_BINS, (low, high))
    heights = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
    return "".join(BARS[height] for height in heights)

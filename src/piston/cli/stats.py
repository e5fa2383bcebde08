"""`piston stats PRESET`: the normalisation statistics of a preset's data."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from piston.cli.console import console, table
from piston.cli.train import parse_preset
from piston.config import DataConfig, TrainConfig
from piston.progress import ProgressBar
from piston.transforms.normalize import constant_dimensions, write_norm_stats

if TYPE_CHECKING:
    from rich.table import Table

    from piston.data.protocol import Dataset
    from piston.data.statistics import KeyStatistics

BARS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24


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


def run_stats(args: list[str]) -> None:
    # A run has a name, which statistics do not need.
    arguments = parse_preset("piston stats", StatsArguments, args, exp_name="stats")
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

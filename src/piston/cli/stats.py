"""`piston stats PRESET [overrides]`: normalisation statistics, written where the preset looks."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.table import Table

from piston import presets
from piston.cli.console import console
from piston.config import DataConfig, TrainConfig
from piston.data.pipeline import keys_used, open_sources
from piston.data.statistics import KeyStatistics, compute_statistics
from piston.data.transformed_columns import TransformedColumns
from piston.progress import ProgressBar
from piston.transforms.normalize import constant_dimensions, write_norm_stats

BARS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24
HELP = """usage: piston stats PRESET [--max-frames N] [overrides of the preset]

Mean, std, q01 and q99 of states and actions after the robot's transforms, from the data set's
columns; no frame is decoded. Written as norm_stats.json where the preset expects it.

  --max-frames N  use a random choice of N frames
`piston stats PRESET --help` lists the overrides; `piston presets` the presets."""


def run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        console().print(HELP, markup=False, highlight=False)
        return 0 if args else 2
    config, max_frames = _parse(args)
    data_config = config.data_config()
    folder = _folder(config, data_config)
    begun = time.monotonic()
    datasets = open_sources(data_config, config.model)
    steps = data_config.steps_read(config.model.action_horizon)
    columns = [
        TransformedColumns(dataset, one, steps)
        for dataset, one in zip(datasets, data_config.each_set())
    ]
    num_all = sum(map(len, columns))
    num_frames = min(num_all, max_frames or num_all)
    with ProgressBar("statistics", "frames", num_frames) as bar:
        statistics = compute_statistics(columns, max_frames=max_frames, progress=bar.advance)
    seconds = time.monotonic() - begun
    names = dimension_names(datasets[0].metadata.features, data_config, statistics)
    for key, of_key in statistics.items():
        console().print(_table(key, of_key, names[key]))
    for warning in warnings(statistics, names, data_config):
        console().print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    path = write_norm_stats(folder, {key: s.norm_stats for key, s in statistics.items()})
    console().print(
        f"{num_frames:,} of {num_all:,} frames in {seconds:.1f} s; "
        f"{precision(num_frames, num_all)}. Written: {path}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def precision(num_chosen: int, num_frames: int) -> str:
    """How far the statistics may be from those of all frames, in words."""
    if num_chosen >= num_frames:
        return "exact"
    # Chosen without putting back: the closer to all of them, the smaller the error.
    share = math.sqrt((1 - num_chosen / num_frames) / num_chosen)
    rank = math.sqrt(0.01 * 0.99) * share
    return (
        f"of a random choice of {num_chosen:,} frames: one standard error of a mean is "
        f"{share:.2g} std, q01 is the quantile 0.01 ± {rank:.1g} and q99 0.99 ± {rank:.1g}"
    )


def _parse(args: Sequence[str]) -> tuple[TrainConfig, int | None]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-frames", type=int)
    own, rest = parser.parse_known_args(list(args))
    if own.max_frames is not None and own.max_frames < 1:
        raise ValueError(f"--max-frames must be at least 1, is {own.max_frames}.")
    preset = presets.get(rest[0])
    if preset.exp_name is tyro.MISSING and "--exp-name" not in rest:
        rest += ["--exp-name", "stats"]  # a run's name, which statistics do not need
    return presets.cli(rest, prog="piston stats"), own.max_frames


def _folder(config: TrainConfig, data_config: DataConfig) -> Path:
    """Where the preset looks for its statistics."""
    if data_config.fake:
        raise ValueError(f"{config.name} trains on random samples; they need no statistics.")
    if data_config.assets_dir is None or data_config.asset_id is None:
        raise ValueError("The statistics have no name: set --data.assets.asset-id.")
    if "://" in data_config.assets_dir:
        raise ValueError(
            f"{config.name} takes the statistics of {data_config.assets_dir}/"
            f"{data_config.asset_id}, which are there already. For statistics of your own, give "
            f"this and training --data.assets.assets-dir {config.assets_dirs}"
        )
    return Path(data_config.assets_dir) / data_config.asset_id


def dimension_names(
    features: Mapping[str, Any], config: DataConfig, statistics: Mapping[str, KeyStatistics]
) -> dict[str, list[str]]:
    """The data set's names where they fit in number, else `state[3]`."""
    used = [key for key in keys_used(config) or features if key in features]
    actions = set(config.action_sequence_keys)
    sources = {
        "actions": [key for key in used if key in actions],
        "state": [key for key in used if key not in actions and not features[key].is_camera],
    }
    names = {}
    for key, of_key in statistics.items():
        dim = of_key.norm_stats.dim
        known = [name for source in sources[key] for name in _flat(features[source].names)]
        fits = len(known) == dim
        names[key] = [known[i] if fits else f"{key}[{i}]" for i in range(dim)]
    return names


def _flat(names: Any) -> list[str]:
    """Names are a list, or lists by group, or missing."""
    if isinstance(names, str):
        return [names]
    if isinstance(names, Mapping):
        return [name for group in names.values() for name in _flat(group)]
    return [name for part in names or () for name in _flat(part)]


def warnings(
    statistics: Mapping[str, KeyStatistics], names: Mapping[str, list[str]], config: DataConfig
) -> list[str]:
    norm_stats = {key: of_key.norm_stats for key, of_key in statistics.items()}
    still = constant_dimensions(norm_stats, config.use_quantile_norm)
    advice = (
        f"the floor of {config.norm_floor:g} keeps their noise small."
        if config.norm_floor
        else "normalised, the slightest noise there explodes. Set --data.norm-floor, or leave "
        "them out."
    )
    found = [
        f"{key}: {_listed(names[key], dims)} never move{'s' * (len(dims) == 1)}; {advice}"
        for key, dims in still.items()
    ]
    for key, of_key in statistics.items():
        q01, q99 = of_key.norm_stats.quantiles
        for dim in of_key.far_outliers():
            low, high = of_key.minimum[dim], of_key.maximum[dim]
            found.append(
                f"{key}: {names[key][dim]} has far outliers: {low:.4g} … {high:.4g}, while 98 % "
                f"lie in {q01[dim]:.4g} … {q99[dim]:.4g}."
            )
    return found


def _listed(names: Sequence[str], dims: Sequence[int]) -> str:
    return ", ".join(f"{names[dim]} (dimension {dim})" for dim in dims)


def _table(key: str, statistics: KeyStatistics, names: Sequence[str]) -> Table:
    table = Table(title=f"{key}: {statistics.count:,} values per dimension", title_justify="left")
    for column in ("", "min", "q01", "mean", "std", "q99", "max"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("min … max", no_wrap=True)
    stats = statistics.norm_stats
    q01, q99 = stats.quantiles
    for dim, name in enumerate(names):
        low, high = statistics.minimum[dim], statistics.maximum[dim]
        numbers = (low, q01[dim], stats.mean[dim], stats.std[dim], q99[dim], high)
        bars = histogram(statistics.sample[dim], low, high)
        table.add_row(name, *(f"{number:.4g}" for number in numbers), bars)
    return table


def histogram(values: np.ndarray, low: float, high: float) -> str:
    """Blocks from `low` to `high`; a bin with any value at all shows at least the lowest."""
    if not high > low:
        return BARS[-1]
    counts, _ = np.histogram(np.clip(values.astype(np.float64), low, high), NUM_BINS, (low, high))
    heights = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
    return "".join(BARS[height] for height in heights)

"""Normalisation: statistics of states and actions, how they are applied, inverted and stored.

    z-score    (x − mean) / (std + 1e-6)
    quantile   (x − q01) / (q99 − q01 + 1e-6) · 2 − 1       nothing is clipped

`piston.data.statistics` computes them.

Dims: d dimensions of a state or action; `*b` any leading axes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from piston.files import read_json_object, write_text
from piston.logs import warn_once
from piston.transforms import Data, require
from piston.transforms.actions import pad_to_dim

logger = logging.getLogger(__name__)

EPSILON = 1e-6
FILE_NAME = "norm_stats.json"


@dataclasses.dataclass(frozen=True, eq=False)
class NormStats:
    """Per dimension: mean, standard deviation, and the 1 % and 99 % quantiles where known."""

    mean: Float[np.ndarray, " d"]
    std: Float[np.ndarray, " d"]
    q01: Float[np.ndarray, " d"] | None = None
    q99: Float[np.ndarray, " d"] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _statistic(value, field.name))
        if (self.q01 is None) != (self.q99 is None):
            raise ValueError("NormStats: give both quantiles, q01 and q99, or neither.")
        sizes = {name: len(value) for name, value in self.items() if value is not None}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"NormStats: all statistics must have one size, found {sizes}.")
        if np.any(self.std < 0):
            raise ValueError(f"NormStats: std must not be negative, found {self.std.tolist()}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NormStats):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def quantiles(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        if self.q01 is None or self.q99 is None:
            raise ValueError("These statistics have no quantiles (q01, q99).")
        return self.q01, self.q99

    def items(self) -> list[tuple[str, Float[np.ndarray, " d"] | None]]:
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]


def _statistic(value: Any, name: str) -> Float[np.ndarray, " d"]:
    array = np.array(value, dtype=np.float64)
    if array.ndim != 1 or not np.all(np.isfinite(array)):
        raise ValueError(f"NormStats: {name} must be a list of finite numbers, found {value!r}.")
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True)
class _Normalization:
    """What `Normalize` and `Unnormalize` have in common."""

    norm_stats: Mapping[str, NormStats]
    use_quantiles: bool = False
    # A smaller std (or half the distance of the quantiles) is replaced by this.
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise ValueError(f"The floor of a normalisation must not be negative, is {self.floor}.")
        without = [key for key, stats in self.norm_stats.items() if stats.q01 is None]
        if self.use_quantiles and without:
            raise ValueError(
                f"Quantile normalisation needs q01 and q99; the statistics of {without} have none. "
                "Compute them again: piston stats PRESET"
            )

    def _offset_and_width(self, stats: NormStats) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and std, or q01 and the distance of the quantiles, with floor and epsilon."""
        if not self.use_quantiles:
            return stats.mean, np.maximum(stats.std, self.floor) + EPSILON
        q01, q99 = stats.quantiles
        return q01, np.maximum(q99 - q01, 2 * self.floor) + EPSILON


class Normalize(_Normalization):
    """Normalise the keys that have statistics. Keys that the data lack are left out.

    Of statistics with more dimensions than the data, the first are used, since released ones are
    often padded to the model's size; fewer are an error.
    """

    def __call__(self, data: Data) -> Data:
        present = {key: stats for key, stats in self.norm_stats.items() if key in data}
        normalized = {key: self._apply(data, key, stats) for key, stats in present.items()}
        return {**data, **normalized}

    def _apply(self, data: Data, key: str, stats: NormStats) -> np.ndarray:
        values = np.asarray(data[key])
        dim = values.shape[-1]
        if stats.dim < dim:
            raise _mismatch("Normalize", key, values, stats)
        if not _is_padding(stats, dim):
            warn_once(
                logger,
                f"{key} {dim} {stats.dim}",
                "Normalize: %r has %d dimensions, its statistics %d; only the first %d are used. "
                "Are these the statistics of this robot?",
                *(key, dim, stats.dim, dim),
            )
        offset, width = self._offset_and_width(stats)
        result = (values - offset[:dim]) / width[:dim]
        if self.use_quantiles:
            result = result * 2.0 - 1.0
        return result.astype(_float_type(values))


class Unnormalize(_Normalization):
    """Invert `Normalize`, for the model's outputs. Every key that has statistics must be there.

    Dimensions beyond those of the statistics are the model's padding and stay as they are.
    """

    def __call__(self, data: Data) -> Data:
        restored = {key: self._apply(data, key, stats) for key, stats in self.norm_stats.items()}
        return {**data, **restored}

    def _apply(self, data: Data, key: str, stats: NormStats) -> np.ndarray:
        values = np.asarray(require(data, key, "Unnormalize"))
        dim = values.shape[-1]
        if stats.dim > dim and not _is_padding(stats, dim):
            raise _mismatch("Unnormalize", key, values, stats)
        offset, width = (statistic[:dim] for statistic in self._offset_and_width(stats))
        if self.use_quantiles:
            known, rest = values[..., : stats.dim], values[..., stats.dim :]
            result = np.concatenate([(known + 1.0) / 2.0 * width + offset, rest], axis=-1)
        else:
            # Padding counts as std 1, epsilon included, as in the released pipelines.
            width = pad_to_dim(width, dim, value=1.0 + EPSILON)
            result = values * width + pad_to_dim(offset, dim)
        return result.astype(_float_type(values))


def constant_dimensions(
    norm_stats: Mapping[str, NormStats], use_quantiles: bool = False
) -> dict[str, list[int]]:
    """Return the dimensions of each key that never move: normalised, their noise would explode."""
    found = {}
    for key, stats in norm_stats.items():
        width = stats.std
        if use_quantiles:
            q01, q99 = stats.quantiles
            width = q99 - q01
        still = np.flatnonzero(width <= EPSILON).tolist()
        if still:
            found[key] = still
    return found


def _is_padding(stats: NormStats, dim: int) -> bool:
    return not np.any(stats.std[dim:] > EPSILON)


def _float_type(values: np.ndarray) -> np.dtype:
    """Return float32 for float32 (computed in float64), a wider type for integers and float64."""
    return np.result_type(values.dtype, np.float32)


def _mismatch(context: str, key: str, values: np.ndarray, stats: NormStats) -> ValueError:
    return ValueError(
        f"{context}: {key!r} has {values.shape[-1]} dimensions (shape {values.shape}), its "
        f"statistics {stats.dim}. They belong to another robot, or to other transforms; compute "
        "them again: piston stats PRESET"
    )


def read_norm_stats(folder: str | Path) -> dict[str, NormStats]:
    """Read the statistics in `folder`, in the file's order."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{FILE_NAME} missing in {folder}. {_contents(path.parent)} Run: piston stats PRESET"
        )
    try:
        entries = read_json_object(path)["norm_stats"]
        return {
            key: NormStats(entry["mean"], entry["std"], entry.get("q01"), entry.get("q99"))
            for key, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{path} is not a statistics file ({type(error).__name__}: {error}). Expected {{"norm_'
            'stats": {key: {"mean": […], "std": […], "q01": […], "q99": […]}}}. Replace it, or '
            "run: piston stats PRESET"
        ) from error


def write_norm_stats(folder: str | Path, norm_stats: Mapping[str, NormStats]) -> Path:
    """Write the public file, byte for byte as other software does."""
    values = {
        key: {name: None if v is None else v.tolist() for name, v in stats.items()}
        for key, stats in norm_stats.items()
    }
    text = json.dumps({"norm_stats": values}, indent=2, ensure_ascii=False)
    path = Path(folder) / FILE_NAME
    write_text(path, re.sub(r"(?m)(?<=^        )(\S+)e([-+]\d+)", _exponential, text))
    return path


def _exponential(number: re.Match[str]) -> str:
    """Write 0.00001 and 1e-6, as the public files have it, for Python's 1e-05 and 1e-06."""
    exponent = int(number[2])
    return f"{Decimal(number[0]):f}" if exponent == -5 else f"{number[1]}e{exponent}"


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "There is no such folder."
    return f"Found there: {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}."

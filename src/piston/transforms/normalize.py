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
from piston.transforms import Data, require, require_numbers
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
        if (self.q01 is None) != (self.q99 is None):
            raise ValueError("NormStats: give both quantiles, q01 and q99, or neither.")
        sizes = {}
        for name, value in list(vars(self).items()):
            if value is not None:
                array = np.array(value, dtype=np.float64)
                if array.ndim != 1 or not np.isfinite(array).all():
                    expected = f"{name} must be a list of finite numbers"
                    raise ValueError(f"NormStats: {expected}, found {value!r}.")
                array.flags.writeable = False
                object.__setattr__(self, name, array)
                sizes[name] = len(array)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"NormStats: all statistics must have one size, found {sizes}.")
        if np.any(self.std < 0):
            raise ValueError(f"NormStats: std must not be negative, found {self.std.tolist()}.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NormStats):
            return NotImplemented
        return all(np.array_equal(value, vars(other)[name]) for name, value in vars(self).items())

    @property
    def dim(self) -> int:
        return len(self.mean)

    def is_padding_from(self, dim: int) -> bool:
        return not np.any(self.std[dim:] > EPSILON)

    @property
    def quantiles(self) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
        if self.q01 is None or self.q99 is None:
            raise ValueError("These statistics have no quantiles (q01, q99).")
        return self.q01, self.q99


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Normalise the keys that have statistics. Keys that the data lack are left out.

    Values of every robot pass here on their way to a model, so NaN and infinity are refused here.
    Of statistics with more dimensions than the data, the first are used, since released ones are
    often padded to the model's size; fewer are an error.
    """

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

    def __call__(self, data: Data) -> Data:
        result = dict(data)
        # A policy with random weights has no statistics; its values are checked all the same.
        for key in dict.fromkeys(("state", "actions", *self.norm_stats)):
            if key not in data:
                continue
            values = require_numbers(data, key, type(self).__name__)
            if not np.isfinite(values).all():
                bad = np.argwhere(~np.isfinite(values)).tolist()
                shown = ", ".join(str(i[0] if len(i) == 1 else tuple(i)) for i in bad[:8])
                more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
                raise ValueError(
                    f"{type(self).__name__}: {key!r} holds NaN or infinity at {shown}{more} (shape "
                    f"{values.shape}); expected finite numbers."
                )
            if key in self.norm_stats:
                converted = self._convert(values, key, self.norm_stats[key])
                # float32 stays float32, computed in float64; integers become float64.
                result[key] = converted.astype(np.result_type(values.dtype, np.float32))
        return result

    def _convert(self, values: np.ndarray, key: str, stats: NormStats) -> np.ndarray:
        dim = values.shape[-1]
        if stats.dim < dim:
            raise self._mismatch(values, key, stats)
        if not stats.is_padding_from(dim):
            warn_once(
                logger,
                f"{key} {dim} {stats.dim}",
                "Normalize: %r has %d dimensions, its statistics %d; only the first %d are used. "
                "Are these the statistics of this robot?",
                *(key, dim, stats.dim, dim),
            )
        offset, width = self._offset_and_width(stats, dim)
        result = (values - offset) / width
        return result * 2.0 - 1.0 if self.use_quantiles else result

    def _mismatch(self, values: np.ndarray, key: str, stats: NormStats) -> ValueError:
        return ValueError(
            f"{type(self).__name__}: {key!r} has {values.shape[-1]} dimensions (shape "
            f"{values.shape}), its statistics {stats.dim}. They belong to another robot, or to "
            "other transforms; compute them again: piston stats PRESET"
        )

    def _offset_and_width(self, stats: NormStats, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and std, or q01 and the distance of the quantiles, with floor and epsilon."""
        if not self.use_quantiles:
            return stats.mean[:dim], np.maximum(stats.std[:dim], self.floor) + EPSILON
        q01, q99 = (quantile[:dim] for quantile in stats.quantiles)
        return q01, np.maximum(q99 - q01, 2 * self.floor) + EPSILON


class Unnormalize(Normalize):
    """Invert `Normalize`, for the model's outputs. Every key that has statistics must be there.

    Dimensions beyond those of the statistics are the model's padding and stay as they are.
    """

    def __call__(self, data: Data) -> Data:
        for key in self.norm_stats:
            require(data, key, "Unnormalize")
        return super().__call__(data)

    def _convert(self, values: np.ndarray, key: str, stats: NormStats) -> np.ndarray:
        dim = values.shape[-1]
        if stats.dim > dim and not stats.is_padding_from(dim):
            raise self._mismatch(values, key, stats)
        offset, width = self._offset_and_width(stats, dim)
        if self.use_quantiles:
            known, rest = values[..., : stats.dim], values[..., stats.dim :]
            return np.concatenate([(known + 1.0) / 2.0 * width + offset, rest], axis=-1)
        # Padding counts as std 1, epsilon included, as in the released pipelines.
        return values * pad_to_dim(width, dim, value=1.0 + EPSILON) + pad_to_dim(offset, dim)


def constant_dimensions(
    norm_stats: Mapping[str, NormStats], use_quantiles: bool = False
) -> dict[str, list[int]]:
    """Return the dimensions of each key that never move: normalised, their noise would explode."""
    found = {}
    for key, stats in norm_stats.items():
        width = np.subtract(*stats.quantiles[::-1]) if use_quantiles else stats.std
        if still := np.flatnonzero(width <= EPSILON).tolist():
            found[key] = still
    return found


def norm_stats_from_json(entries: Mapping[str, Any]) -> dict[str, NormStats]:
    return {
        key: NormStats(entry["mean"], entry["std"], entry.get("q01"), entry.get("q99"))
        for key, entry in entries.items()
    }


def norm_stats_to_json(norm_stats: Mapping[str, NormStats]) -> dict[str, Any]:
    return {
        key: {name: None if v is None else v.tolist() for name, v in vars(stats).items()}
        for key, stats in norm_stats.items()
    }


def read_norm_stats(folder: str | Path) -> dict[str, NormStats]:
    """Read the statistics in `folder`, in the file's order."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        names = ", ".join(sorted(p.name for p in path.parent.glob("*")))
        found = f"Found there: {names or 'nothing'}."
        if not path.parent.is_dir():
            found = "There is no such folder."
        raise FileNotFoundError(
            f"{FILE_NAME} missing in {folder}. {found} Run: piston stats PRESET"
        )
    try:
        return norm_stats_from_json(read_json_object(path)["norm_stats"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{path} is not a statistics file ({type(error).__name__}: {error}). Expected {{"norm_'
            'stats": {key: {"mean": […], "std": […], "q01": […], "q99": […]}}}. Replace it, or '
            "run: piston stats PRESET"
        ) from error


def write_norm_stats(folder: str | Path, norm_stats: Mapping[str, NormStats]) -> Path:
    """Write the public file, byte for byte as other software does."""

    def exponential(number: re.Match[str]) -> str:
        # 0.00001 and 1e-6 for Python's 1e-05 and 1e-06.
        exponent = int(number[2])
        return f"{Decimal(number[0]):f}" if exponent == -5 else f"{number[1]}e{exponent}"

    values = norm_stats_to_json(norm_stats)
    text = json.dumps({"norm_stats": values}, indent=2, ensure_ascii=False)
    path = Path(folder) / FILE_NAME
    write_text(path, re.sub(r"(?m)(?<=^        )(\S+)e([-+]\d+)", exponential, text))
    return path

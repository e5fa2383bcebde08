"""Normalisation: statistics of states and actions, how they are applied, undone and kept in a file.

    z-score    (x − mean) / (std + 1e-6)
    quantile   (x − q01) / (q99 − q01 + 1e-6) · 2 − 1       nothing is clipped

Computing statistics from data is not done here.

Dims: d dimensions of a state or action; `*b` any leading axes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import uuid
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from piston.transforms.actions import pad_to_dim
from piston.transforms.base import Data, require_vector

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
        pairs = zip(self.items(), other.items())
        return all(_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)

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


def _equal(mine: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return np.array_equal(mine, theirs)


@dataclasses.dataclass(frozen=True)
class _Normalization:
    """What `Normalize` and `Unnormalize` share: x = offset + scale · y, per dimension."""

    norm_stats: Mapping[str, NormStats]
    use_quantiles: bool = False
    # A std (or half the distance of the quantiles) smaller than this counts as this.
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
        """Mean and std, or q01 and the distance of the quantiles, bounded and with epsilon."""
        if not self.use_quantiles:
            return stats.mean, np.maximum(stats.std, self.floor) + EPSILON
        q01, q99 = stats.quantiles
        return q01, np.maximum(q99 - q01, 2 * self.floor) + EPSILON


class Normalize(_Normalization):
    """Statistics wider than the data lend their first dimensions; narrower ones are an error.

    Released statistics are often padded to the model's size. Keys that the data does not have are
    passed over: at inference there are no actions.
    """

    def __call__(self, data: Data) -> Data:
        present = {key: stats for key, stats in self.norm_stats.items() if key in data}
        normalized = {key: self._apply(data, key, stats) for key, stats in present.items()}
        return {**data, **normalized}

    def _apply(self, data: Data, key: str, stats: NormStats) -> np.ndarray:
        values = require_vector(data, key, None, "Normalize")
        dim = values.shape[-1]
        if stats.dim < dim:
            raise _mismatch("Normalize", key, values, stats)
        if not _is_padding(stats, dim):
            _warn_cut("Normalize", key, dim, stats.dim)
        offset, width = self._offset_and_width(stats)
        result = (values - offset[:dim]) / width[:dim]
        if self.use_quantiles:
            result = result * 2.0 - 1.0
        return result.astype(_float_type(values))


class Unnormalize(_Normalization):
    """The inverse of `Normalize`, on what the model gives.

    Data wider than its statistics is the model's padding and passes through. Every key that has
    statistics must be there.
    """

    def __call__(self, data: Data) -> Data:
        restored = {key: self._apply(data, key, stats) for key, stats in self.norm_stats.items()}
        return {**data, **restored}

    def _apply(self, data: Data, key: str, stats: NormStats) -> np.ndarray:
        values = require_vector(data, key, None, "Unnormalize")
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
    """The dimensions of each key that never move: normalised, their slightest noise explodes."""
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
    """float32 stays float32 (computed in float64), integers and halves become wide enough."""
    return np.result_type(values.dtype, np.float32)


def _mismatch(who: str, key: str, values: np.ndarray, stats: NormStats) -> ValueError:
    return ValueError(
        f"{who}: {key!r} has {values.shape[-1]} dimensions (shape {values.shape}), its statistics "
        f"{stats.dim}. They belong to another robot, or to other transforms; compute them again: "
        "piston stats PRESET"
    )


@functools.cache
def _warn_cut(who: str, key: str, dim: int, stats_dim: int) -> None:
    logger.warning(
        "%s: %r has %d dimensions, its statistics %d; only the first %d are used. "
        "Are these the statistics of this robot?",
        who, key, dim, stats_dim, dim,
    )  # fmt: skip


def read_norm_stats(folder: str | Path) -> dict[str, NormStats]:
    """The statistics kept in `folder`, in the file's order."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{FILE_NAME} missing in {folder}. {_contents(path.parent)} Run: piston stats PRESET"
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        return {key: _stats_from_json(entry) for key, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{path} is not a statistics file ({type(error).__name__}: {error}). Expected {{"norm_'
            'stats": {key: {"mean": […], "std": […], "q01": […], "q99": […]}}}. Replace it, or '
            "run: piston stats PRESET"
        ) from error


def write_norm_stats(folder: str | Path, norm_stats: Mapping[str, NormStats]) -> Path:
    """Writes the public file, byte for byte as others do; at once or not at all."""
    text = _to_json({"norm_stats": {key: dict(stats.items()) for key, stats in norm_stats.items()}})
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{FILE_NAME}.{uuid.uuid4().hex}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "There is no such folder."
    return f"Found there: {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}."


def _stats_from_json(entry: Mapping[str, Any]) -> NormStats:
    return NormStats(entry["mean"], entry["std"], entry.get("q01"), entry.get("q99"))


def _to_json(value: Any, indent: str = "") -> str:
    """Two-space JSON without a newline at the end. Only what a statistics file holds."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return _number_to_json(value)
    inner = indent + "  "
    if isinstance(value, Mapping):
        brackets = "{}"
        items = [
            f"{json.dumps(key, ensure_ascii=False)}: {_to_json(item, inner)}"
            for key, item in value.items()
        ]
    else:
        brackets = "[]"
        items = [_to_json(item, inner) for item in value.tolist()]
    if not items:
        return brackets
    body = f",\n{inner}".join(items)
    return f"{brackets[0]}\n{inner}{body}\n{indent}{brackets[1]}"


def _number_to_json(number: float) -> str:
    """Shortest digits, as the public files write them: 0.00001 and 1e-6, not 1e-05 and 1e-06."""
    mantissa, _, exponent = repr(number).partition("e")
    if not exponent:
        return mantissa
    if int(exponent) == -5:
        return f"{Decimal(repr(number)):f}"
    return f"{mantissa}e{int(exponent)}"

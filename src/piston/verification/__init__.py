"""Reference cases: replay them through Piston's own code and measure the largest errors.

All sizes and values come from the files of a case, so that cases made elsewhere work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from piston.verification import data, models
from piston.verification.quantity import Quantity, failed

# Each kind of case, with the functions that recognise and replay it.
_KINDS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Iterator[Quantity]]]] = {
    "transforms (a .json with its .npz beside it)": (data.is_transforms, data.replay_transforms),
    "models (a folder with case.npz and config.json)": (models.is_model, models.replay_model),
    "data sets (a folder with meta/info.json)": (data.is_dataset, data.replay_dataset),
    "norm stats (a folder with norm_stats.json)": (data.is_norm_stats, data.replay_norm_stats),
}


def find_cases(path: Path) -> list[Path]:
    """Return the path itself if it is a case, else the cases below it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if _kind(path) is not None:
        return [path]
    below = sorted(p for p in path.rglob("*") if _kind(p) is not None) if path.is_dir() else []
    if not below:
        raise ValueError(f"{path} holds no known case. Known kinds: {'; '.join(_KINDS)}.")
    return below


def replay(case: Path) -> Iterator[Quantity]:
    """Compare every quantity of a case. One that cannot be read is a failed quantity."""
    kind = _kind(case)
    if kind is None:
        raise ValueError(f"{case} is not a known case. Known kinds: {'; '.join(_KINDS)}.")
    count = 0
    try:
        for quantity in _KINDS[kind][1](case):
            count += 1
            yield quantity
    except Exception as error:
        yield failed(f"after {count} quantities", f"{type(error).__name__}: {error}")
    else:
        if count == 0:
            yield failed("nothing compared", "the case holds no quantity that is known")


def _kind(path: Path) -> str | None:
    return next((name for name, (matches, _) in _KINDS.items() if matches(path)), None)

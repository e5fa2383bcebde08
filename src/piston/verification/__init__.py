"""Replays reference cases through the product's own code and measures the largest error.

Knows which kind of case a path is; each kind is replayed by a module of its own. All sizes and
values come from the case's files, so that a case made elsewhere in the same format works too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from piston.verification import datasets, models, norm_stats, transforms
from piston.verification.quantity import Quantity, failed

# What a kind of case is called → the module that recognises and replays it.
_KINDS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Iterator[Quantity]]]] = {
    "transforms (a .json with its .npz beside it)": (transforms.matches, transforms.replay),
    "models (a folder with case.npz and config.json)": (models.matches, models.replay),
    "data sets (a folder with meta/info.json)": (datasets.matches, datasets.replay),
    "norm stats (a folder with norm_stats.json)": (norm_stats.matches, norm_stats.replay),
}


def find_cases(path: Path) -> list[Path]:
    """The path itself if it is a case, else the cases below it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    if _kind(path) is not None:
        return [path]
    below = sorted(p for p in path.rglob("*") if _kind(p) is not None) if path.is_dir() else []
    if not below:
        raise ValueError(f"{path} holds no case that is known. Known kinds: {'; '.join(_KINDS)}.")
    return below


def replay(case: Path) -> Iterator[Quantity]:
    """Every quantity of one case, compared. What cannot be read is a quantity that failed."""
    kind = _kind(case)
    if kind is None:
        raise ValueError(f"{case} is no case that is known. Known kinds: {'; '.join(_KINDS)}.")
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

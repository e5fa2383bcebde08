"""Several runs on one page: results, curves over each other, and the settings that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from piston.files import read_json_object
from piston.progress import shortened
from piston.report.document import Missing, render, small_plot
from piston.report.evaluation import find_evaluations
from piston.report.figures import Line, duration, is_wide
from piston.report.training import Run, action_error
from piston.training.run import CONFIG, UNCOMPARED
from piston.transforms import flatten_dict

MAX_RUNS = 8  # as many colours are easy to distinguish
_LONGEST_VALUE = 100
Runs = Mapping[str, Run]  # by the shortest name that distinguishes them

_CURVES = ("loss", "validation/loss", "validation/action_error")


def common_folder(folders: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([folder.absolute() for folder in folders]))


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by their folders' names, with as many parents as distinguish them."""
    folders = [run.folder.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise ValueError("A run is given twice. Give each run once.")
    if len(runs) > MAX_RUNS:
        raise ValueError(f"{len(runs)} runs are given; at most {MAX_RUNS} can be compared.")
    base = common_folder(folders)
    if base in folders:  # one of them contains the others
        base = base.parent
    return {folder.relative_to(base).as_posix(): run for folder, run in zip(folders, runs)}


def _entries(runs: Runs) -> list[tuple[str, str]]:
    """Return the style class and the name of each run."""
    return [(f"run-{index}", name) for index, name in enumerate(runs)]


def results(runs: Runs) -> Markup:
    """Return the section with the last measurements of each run."""

    def number(run: Run, name: str) -> str | None:
        value = run.last(name)
        return None if value is None else f"{value:.4g}"

    def steps(run: Run) -> str | None:
        logged = run.curve("loss")[0]
        return f"{logged[-1] + 1:,.0f}" if len(logged) else None

    columns: dict[str, Callable[[Run], str | None]] = {
        "steps": steps,
        "loss": lambda run: number(run, "loss"),
        "validation loss": lambda run: number(run, "validation/loss"),
        "action error": lambda run: number(run, "validation/action_error"),
        "training": lambda run: duration(run.training_seconds) if steps(run) else None,
        "samples/s": lambda run: number(run, "samples_per_second"),
    }
    cells = {name: {c: find(run) for c, find in columns.items()} for name, run in runs.items()}
    for name, run in runs.items():
        for one in find_evaluations(run.folder):
            cells[name][f"success, {one.name}"] = str(one.success)
    header = list(dict.fromkeys(column for row in cells.values() for column in row))
    header = [column for column in header if any(row.get(column) for row in cells.values())]
    rows = [
        (look, name, [cells[name].get(column) or "–" for column in header])
        for look, name in _entries(runs)
    ]
    return render("results.html", header=header, rows=rows)


def curves(runs: Runs) -> Markup:
    """Return the section with the curves of all runs over each other."""
    drawn: dict[str, tuple[list[Line], bool]] = {}
    for name in _CURVES:
        found = [(look, label, runs[label].curve(name)) for look, label in _entries(runs)]
        lines = [Line(*curve, look, label) for look, label, curve in found if len(curve[0])]
        if lines:
            drawn[name] = (lines, is_wide(np.concatenate([line.y for line in lines])))
    if not drawn:
        raise Missing("no run has logged a loss yet.")
    return render("curves.html", curves=drawn, action_error=action_error(runs.values()))


def error_per_dim(runs: Runs) -> Markup:
    """Return the section with the validation error of each action dimension."""
    names = list(dict.fromkeys(dim for run in runs.values() for dim in run.error_per_dim))
    if not names:
        raise Missing("no run has validated. Train with --validation-episodes 5")
    figures = []
    for dim in names:
        found = ((look, runs[label].error_per_dim.get(dim)) for look, label in _entries(runs))
        lines = [Line(*curve, look) for look, curve in found if curve is not None]
        figures.append(small_plot(dim, lines, "step", from_zero=True))
    return render(
        "error_per_dim.html",
        action_error=action_error(runs.values()),
        looks=_entries(runs),
        figures=figures,
    )


def settings(runs: Runs) -> Markup:
    """Return the section with the settings in which the runs differ."""
    values = [_settings(run) for run in runs.values()]
    keys = list(dict.fromkeys(key for one in values for key in one))
    different = [key for key in keys if len({one.get(key, "–") for one in values}) > 1]
    return render(
        "settings.html",
        num_keys=len(keys),
        looks=_entries(runs),
        rows=[(key, [one.get(key, "–") for one in values]) for key in different],
    )


def _settings(run: Run) -> dict[str, str]:
    saved: dict[str, Any] = flatten_dict(read_json_object(run.folder / CONFIG), ".")
    return {
        key: shortened(str(value), _LONGEST_VALUE)
        for key, value in saved.items()
        if key not in UNCOMPARED
    }

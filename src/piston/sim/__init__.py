"""Simulated robots: environments, scripted experts, recording and evaluation.

    aloha_transfer_cube   aloha_insertion       ALOHA with one small camera
    aloha_transfer_cube_stock …                 as gymnasium.make builds it
    metaworld:drawer-open                       one task
    metaworld:drawer-open,drawer-close          a mixture: the seed selects the task
    metaworld:tiny                              a mixture with a name

The simulators are imported when the first environment is created, not before.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from piston.extras import needed_for
from piston.llvm import load_triton
from piston.sim.environment import (
    RECORDING_SEEDS,
    Demonstration,
    Environment,
    Expert,
    check_evaluation_seeds,
)
from piston.sim.metaworld_tasks import MIXTURES, TASKS, MetaworldTask
from piston.suggestions import did_you_mean

__all__ = [
    "RECORDING_SEEDS",
    "Demonstration",
    "Environment",
    "Expert",
    "check_evaluation_seeds",
    "environment_names",
    "make_environment",
    "make_expert",
]

# A program may import this module, render with another library, and build a model after that.
load_triton()

METAWORLD = "metaworld:"
_STOCK = "_stock"
_ALOHA = ("aloha_transfer_cube", "aloha_insertion")


def environment_names() -> list[str]:
    """List the names that `make_environment` knows, except mixtures written with commas."""
    aloha = [f"{name}{kind}" for kind in ("", _STOCK) for name in _ALOHA]
    return aloha + [f"{METAWORLD}{name}" for name in (*MIXTURES, *TASKS)]


def make_environment(name: str, *, pixels: int | None = None) -> Environment:
    """Create an environment; `pixels` is the side of its square camera images."""
    if pixels is not None and pixels < 1:
        raise ValueError(f"Images need at least one pixel, found pixels={pixels}.")
    size = {} if pixels is None else {"pixels": pixels}
    if name.startswith(METAWORLD):
        tasks = _metaworld_tasks(name)
        return _simulator("metaworld").MetaworldEnvironment(name, tasks, **size)
    _check_name(name)
    aloha = _simulator("aloha")
    kind = aloha.StockAlohaEnvironment if name.endswith(_STOCK) else aloha.AlohaEnvironment
    return kind(aloha.TASKS[name.removesuffix(_STOCK)], **size)


def make_expert(name: str) -> Expert:
    """Create the scripted expert for the environment of that name."""
    if name.startswith(METAWORLD):
        _metaworld_tasks(name)
        return _simulator("metaworld").MetaworldExpert()
    _check_name(name)
    experts = _simulator("aloha_experts")
    insertion = name.removesuffix(_STOCK) == "aloha_insertion"
    return experts.ScriptedAloha(experts.plan_insertion if insertion else experts.plan_transfer)


def _metaworld_tasks(name: str) -> tuple[MetaworldTask, ...]:
    """Return the tasks named after `metaworld:`."""
    tasks: list[MetaworldTask] = []
    for part in name.removeprefix(METAWORLD).split(","):
        # The package's own names end in its version.
        task = part.strip().removesuffix("-v3")
        _check_name(f"{METAWORLD}{task}")
        tasks.extend(TASKS[member] for member in MIXTURES.get(task, (task,)))
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"{name} names a task twice.")
    return tuple(tasks)


def _check_name(name: str) -> None:
    known = environment_names()
    if name not in known:
        raise ValueError(
            f"No environment is named {name!r}.{did_you_mean(name, known)} There are "
            f"{', '.join(_ALOHA)} (each also with {_STOCK}), {METAWORLD}tiny and {METAWORLD}TASK, "
            f"for example {METAWORLD}drawer-open."
        )


def _simulator(module: str) -> ModuleType:
    with needed_for("The simulator"):
        return importlib.import_module(f"piston.sim.{module}")

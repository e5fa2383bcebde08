"""Environments and their experts by name.

    aloha_transfer_cube   aloha_insertion       ALOHA, one small camera
    aloha_transfer_cube_stock …                 as gymnasium.make builds it
    metaworld:drawer-open                       one task
    metaworld:drawer-open,drawer-close          a mixture: the seed decides
    metaworld:tiny                              a mixture with a name

The simulators are imported only when one of them is asked for.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from types import ModuleType

from piston.sim.environment import Environment, Expert
from piston.sim.metaworld_tasks import MIXTURES, TASKS, MetaworldTask

METAWORLD = "metaworld:"
_STOCK = "_stock"
_ALOHA = ("aloha_transfer_cube", "aloha_insertion")


def environment_names() -> list[str]:
    """Every name that `make_environment` knows, other than mixtures made up with commas."""
    return [
        *_ALOHA,
        *(f"{name}{_STOCK}" for name in _ALOHA),
        *(f"{METAWORLD}{name}" for name in (*MIXTURES, *TASKS)),
    ]


def make_environment(name: str, *, pixels: int | None = None) -> Environment:
    """A new environment; `pixels` is the side of its square camera images."""
    if pixels is not None and pixels < 1:
        raise ValueError(f"Images need at least one pixel, found pixels={pixels}.")
    size = {} if pixels is None else {"pixels": pixels}
    if name.startswith(METAWORLD):
        tasks = _metaworld_tasks(name)
        return _simulator("metaworld").MetaworldEnvironment(name, tasks, **size)
    _check(name, environment_names())
    aloha = _simulator("aloha")
    kind = aloha.StockAlohaEnvironment if name.endswith(_STOCK) else aloha.AlohaEnvironment
    return kind(aloha.TASKS[name.removesuffix(_STOCK)], **size)


def make_expert(name: str) -> Expert:
    """Who can show how the environment of that name is solved."""
    if name.startswith(METAWORLD):
        _metaworld_tasks(name)
        return _simulator("metaworld").MetaworldExpert()
    _check(name, environment_names())
    experts = _simulator("aloha_experts")
    insertion = name.removesuffix(_STOCK) == "aloha_insertion"
    return experts.ScriptedAloha(experts.plan_insertion if insertion else experts.plan_transfer)


def _metaworld_tasks(name: str) -> tuple[MetaworldTask, ...]:
    """The tasks behind what follows `metaworld:`."""
    known = [f"{METAWORLD}{task}" for task in (*MIXTURES, *TASKS)]
    tasks: list[MetaworldTask] = []
    for part in name.removeprefix(METAWORLD).split(","):
        # People who know the package write its version, too.
        task = part.strip().removesuffix("-v3")
        _check(f"{METAWORLD}{task}", known)
        tasks.extend(TASKS[member] for member in MIXTURES.get(task, (task,)))
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"{name} names a task twice.")
    return tuple(tasks)


def _check(name: str, known: list[str]) -> None:
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"No environment is named {name!r}.{hint} There are {', '.join(_ALOHA)} (each also "
            f"with {_STOCK}), {METAWORLD}tiny and {METAWORLD}TASK, for example "
            f"{METAWORLD}drawer-open."
        )


def _simulator(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"piston.sim.{module}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The simulators are not installed (no module {error.name!r}). "
            "Run: pip install 'piston[sim]'"
        ) from error

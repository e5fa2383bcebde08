"""Names that moved: the old name works until version 0.3.0 and warns once with the new one.

Whoever moves a name that documentation or examples show adds a row to `MOVED`, old → new. A module,
or a package with all that is in it:

    "piston.client": "piston_client",

A name in a module; the new place may have another name for it:

    "piston.data.video:num_usable_cpus": "piston.work:num_cpus",

If the old module is gone, that is all. If it still exists, it ends with the line

    __getattr__ = moved_names(__name__)

A moved module is one object under both names. Nothing is imported before an old name is used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in typing, whose import takes longer than `import piston` should
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MOVED = {
    "piston.client": "piston_client",
    "piston.data.recorder": "piston.data.record",
    "piston.inspection.server": "piston.viewer.inspector",
    "piston.report.markup": "piston.report.figures",
}


class OldNames:
    """Finds and loads modules under their old names, in the first place of `sys.meta_path`."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if new_module(name) is None and not any(old.startswith(f"{name}:") for old in MOVED):
            return None
        from importlib.machinery import ModuleSpec, PathFinder

        # A module from which only some names have moved is found as usual.
        if new_module(name) is None and PathFinder.find_spec(name, path) is not None:
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = new_module(old)
        if new is None:
            vars(module)["__getattr__"] = moved_names(old)
            return
        import importlib

        sys.modules[old] = importlib.import_module(new)
        if old in MOVED:  # for what is below a package, importing the package has warned
            _warn(old, new)


def new_module(name: str) -> str | None:
    """Return the new name of a module that moved, by itself or with its package."""
    package, below = name, ""
    while package:
        if package in MOVED:
            return MOVED[package] + below
        package, dot, last = package.rpartition(".")
        below = f"{dot}{last}{below}"
    return None


def moved_names(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module from which names have moved."""

    def find(name: str) -> Any:
        new = MOVED.get(f"{module}:{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        import importlib

        place, _, new_name = new.partition(":")
        found = getattr(importlib.import_module(place), new_name)
        vars(sys.modules[module])[name] = found  # so that it is not looked up here again
        _warn(f"{module}.{name}", f"{place}.{new_name}")
        return found

    return find


def _warn(old: str, new: str) -> None:
    import warnings

    message = f"{old} is named {new} now. The old name works until version 0.3.0."
    # Shown at the line that uses the old name; frames of Python's import system do not count.
    warnings.warn(message, FutureWarning, stacklevel=3)

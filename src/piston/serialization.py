"""Configurations as JSON and back: what is written is read back as an equal object.

A dataclass carries the name under which its class is registered (`"type": "pi0"`). Reading looks
the name up and never imports anything: a class is known once its module has been imported.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tyro

from piston import older_configs
from piston.suggestions import did_you_mean

_TYPE = "type"
# The module of a class that is not Piston's, for the message where it is not registered.
_MODULE = "defined_in"
_MISFIT = object()
_classes: dict[str, Any] = {}
_names: dict[type, str] = {}
_imported: list[Path] = []

Class = TypeVar("Class", bound=type)


def register(name: str) -> Callable[[Class], Class]:
    """Name a configuration dataclass in JSON files; a decorator above `@dataclass`."""

    def decorate(cls: Class) -> Class:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} is not a dataclass: put @register above @dataclass.")
        other = _classes.get(name, cls)
        if _qualified_name(other) != _qualified_name(cls):
            raise ValueError(
                f"{name!r} is the registered name of {_qualified_name(other)} already. Choose "
                f"another one for {_qualified_name(cls)}."
            )
        _classes[name], _names[cls] = cls, name
        return cls

    return decorate


def to_json(value: Any) -> Any:
    """Return plain JSON values.

    Raise an error if a field is not set (MISSING), has no JSON form, or would come back as another
    type, like a tuple where only `Any` is declared.
    """
    data = _plain(value, "config")
    back = from_json(data)
    if back != value:
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        differing = [f.name for f in fields if getattr(back, f.name) != getattr(value, f.name)]
        raise TypeError(
            f"{', '.join(differing) or 'the value'} would not be read back equal. Use lists and "
            "strings where the declared type does not say tuple or Path."
        )
    return data


def from_json(data: Any, hint: Any = Any, where: str = "config") -> Any:
    """Invert `to_json`. Raise ValueError if a value does not fit its declared type, `hint`.

    `where` is the file and the field, for the message.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for member in typing.get_args(hint) if is_union else (hint,):
        value = _read(data, member, where)
        if value is not _MISFIT:
            return value
    found = f"a {type(data).__name__}" if isinstance(data, dict | list) else repr(data)
    expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ValueError(f"{where} is {found}; expected {expected}.")


def _plain(value: Any, where: str) -> Any:
    if value is tyro.MISSING:
        raise ValueError(f"{where} is not set; set it before the configuration is written.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in _names:
            raise TypeError(
                f"{where} is a {type(value).__name__}, which is not registered: nothing could read "
                'it again. Write @register("a_name") (piston.serialization) above its class.'
            )
        names = [field.name for field in dataclasses.fields(value) if field.init]
        fields = {name: _plain(getattr(value, name), f"{where}.{name}") for name in names}
        module = type(value).__module__
        origin = {} if module.partition(".")[0] == "piston" else {_MODULE: module}
        return {_TYPE: _names[type(value)], **origin, **fields}
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str) or key == _TYPE]:
            raise TypeError(f"{where} has keys that JSON cannot carry back: {bad}.")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kinds = "plain values, tuples, dicts and dataclasses"
    raise TypeError(f"{where} is a {type(value).__name__}, which has no JSON form. Use {kinds}.")


def _read(data: Any, hint: Any, where: str) -> Any:
    """Return the value as this type, which is no union, or _MISFIT."""
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(data, dict) and _TYPE in data:
        value = _read_dataclass(data, where)
        fits = kind is Any or (isinstance(kind, type) and isinstance(value, kind))
        return value if fits else _MISFIT
    if isinstance(data, dict) and kind in (Any, dict, collections.abc.Mapping):
        values = args[-1] if args else Any
        return {key: from_json(item, values, f"{where}.{key}") for key, item in data.items()}
    if isinstance(data, list) and kind in (Any, list, tuple, collections.abc.Sequence):
        # `tuple[int, Path]` has a type for each place; `tuple[int, ...]` and `list[int]` have one.
        each = kind is tuple and args and Ellipsis not in args
        if each and len(args) != len(data):
            return _MISFIT
        hints = args if each else [args[0] if args else Any] * len(data)
        items = [from_json(x, h, f"{where}[{i}]") for i, (x, h) in enumerate(zip(data, hints))]
        return tuple(items) if kind is tuple else items
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is typing.Literal:
        return data if data in args else _MISFIT
    if kind is float and type(data) is int:
        return data
    return data if kind in (Any, type(data)) else _MISFIT


def _read_dataclass(data: dict[str, Any], where: str) -> Any:
    name = older_configs.TYPES.get(str(data[_TYPE]), str(data[_TYPE]))
    # A robot that a user defined is found by the name of 0.1.0 too, once it is registered.
    cls = _classes.get(name) or {_qualified_name(one): one for one in _names}.get(name)
    if cls is None:
        raise ValueError(f"{where} {_unknown_type(name, data.get(_MODULE))}")
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    data = older_configs.translated(data, name, names, where)
    if unknown := sorted(data.keys() - names - {_TYPE, _MODULE}):
        raise ValueError(
            f"{where} has fields that {cls.__name__} does not know: {', '.join(unknown)}. "
            "It was probably written by a newer version of Piston."
        )
    given = names & data.keys()
    fields = {name: from_json(data[name], hints[name], f"{where}.{name}") for name in given}
    try:
        return cls(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a valid {cls.__name__}: {error}") from error


def _unknown_type(name: str, module: Any) -> str:
    """Say what is not registered and what to give. `module` is what the file says of its origin."""
    found = f"is of type {name!r}, which is not registered.{did_you_mean(name, _classes)}"
    if module is None and ":" in name:  # as 0.1.0 wrote it
        module = name.partition(":")[0]
    if not isinstance(module, str) or module.partition(".")[0] == "piston":
        return (
            f"{found} Registered are {', '.join(sorted(_classes))}. If it is of your own making, "
            "name the file that defines it: PISTON_PRESETS=/path/to/my_robot.py"
        )
    file = f"{module.rpartition('.')[2]}.py" if module != "__main__" else "my_robot.py"
    return (
        f"{found} The module {module!r} defined it where this was written, and no code is stored "
        f"with a configuration. Copy its file to this machine and name it: "
        f"PISTON_PRESETS=/path/to/{file}"
    )


def import_file(path: str | Path) -> None:
    """Import a Python file as a module of its name, without a change of Python's path."""
    path = Path(path).expanduser().resolve()
    name = path.stem
    if path in _imported:
        return
    if name in sys.modules:
        raise ValueError(f"A module named {name!r} is imported already: give {path} another name.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"There is no Python file {path}.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    _imported.append(path)  # before it runs: the file may use what imports it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        _imported.remove(path)
        raise


class ImportedFiles:
    """Imports the files of `import_file` in a process where it is unpickled, as in this one.

    It has to precede objects whose classes these files define.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_files, tuple(_imported)


def _import_files(*paths: Path) -> ImportedFiles:
    for path in paths:
        import_file(path)
    return ImportedFiles()


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"

"""Configuration as JSON and back: what was written is read back as an equal object.

Every dataclass carries its type (`"type": "piston.models.configs:Pi0Config"`), so that a checkpoint
made with a user's own robot finds that robot's classes again. Knows nothing of particular configs.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import types
import typing
from pathlib import Path
from typing import Any

import tyro

_TYPE = "type"


def to_json(value: Any) -> Any:
    """Plain JSON values. An unset (MISSING) field or a value with no JSON form is an error.

    So is what would come back as another type: a tuple or path where only `Any` is declared.
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


def _plain(value: Any, where: str) -> Any:
    if value is tyro.MISSING:
        raise ValueError(f"{where} is not set; set it before the configuration is written.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _plain(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
            if field.init
        }
        return {_TYPE: type_name(type(value)), **fields}
    if isinstance(value, collections.abc.Mapping):
        if bad := [key for key in value if not isinstance(key, str) or key == _TYPE]:
            raise TypeError(f"{where} has keys that JSON cannot carry back: {bad}.")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which has no JSON form. Use plain values, tuples, "
        "dicts and dataclasses in configurations."
    )


def from_json(data: Any, hint: Any = Any, where: str = "config") -> Any:
    """The inverse of `to_json`. `hint` is the declared type, which tells tuples from lists."""
    if isinstance(data, dict) and _TYPE in data:
        return _dataclass_from_json(data, where)
    if isinstance(data, dict):
        hint = _choose(hint, (dict, collections.abc.Mapping))
        value_hint = (typing.get_args(hint) or (Any, Any))[-1]
        return {key: from_json(item, value_hint, f"{where}.{key}") for key, item in data.items()}
    if isinstance(data, list):
        hint = _choose(hint, (tuple, list))
        elements = _element_hints(hint, len(data))
        items = [
            from_json(item, element, f"{where}[{index}]")
            for index, (item, element) in enumerate(zip(data, elements))
        ]
        return tuple(items) if _is(hint, tuple) else items
    if isinstance(data, str) and _is(_choose(hint, (Path,)), Path):
        return Path(data)
    return data


def _element_hints(hint: Any, count: int) -> list[Any]:
    """`tuple[int, Path]` has a type for each place; `tuple[int, ...]`, `list[int]` one for all."""
    args = typing.get_args(hint)
    if len(args) == count and _is(hint, tuple) and Ellipsis not in args:
        return list(args)
    return [args[0] if args else Any] * count


def type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _dataclass_from_json(data: dict[str, Any], where: str) -> Any:
    cls = _find_type(data[_TYPE], where)
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    if unknown := sorted(data.keys() - names - {_TYPE}):
        raise ValueError(
            f"{where} has fields that {cls.__name__} does not know: {', '.join(unknown)}. "
            "It was probably written by a newer version of Piston."
        )
    fields = {
        name: from_json(data[name], hints[name], f"{where}.{name}")
        for name in names
        if name in data
    }
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"{where} is not a whole {cls.__name__}: {error}.") from error


def _find_type(name: Any, where: str) -> Any:
    module_name, _, class_name = str(name).partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where} is of type {name!r}, which cannot be imported here ({error}). Install or put "
            "on PYTHONPATH the package that defines it."
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{where} is of type {name!r}, which is not a configuration dataclass.")
    return found


def _choose(hint: Any, kinds: tuple[type, ...]) -> Any:
    """Of `X | Y | None`, the member that is one of these kinds."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next((arg for arg in typing.get_args(hint) if any(_is(arg, k) for k in kinds)), Any)
    return hint


def _is(hint: Any, kind: type) -> bool:
    return hint is kind or typing.get_origin(hint) is kind

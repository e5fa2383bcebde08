"""Configurations survive JSON; what cannot is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tyro

from piston import presets
from piston.serialization import from_json, to_json


@dataclasses.dataclass(frozen=True)
class Inner:
    numbers: tuple[int, ...] = (1, 2)
    names: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    pairs: tuple[tuple[str, float], ...] = (("a", 1.5),)
    inners: tuple[Inner, ...] = (Inner((3,)),)
    folder: Path | None = Path("x/y")
    anything: dict[str, Any] | None = None
    required: int = 0


@dataclasses.dataclass(frozen=True)
class Mixed:
    pair: tuple[int, Path]
    named: dict[str, tuple[int, ...]] | None = None


def _through_text(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_read_back_equal(name):
    preset = presets.get(name)
    filled = dataclasses.replace(
        preset,
        exp_name="run",
        data=dataclasses.replace(preset.data, repo_id="somebody/something"),
    )
    back = _through_text(filled)
    assert back == filled
    assert type(back.data) is type(filled.data)


def test_tuples_lists_paths_and_nested_dataclasses_keep_their_types():
    value = Outer(inner=Inner((), ["a"]), anything={"pose": [0, 1.5], "deep": {"n": None}})
    back = _through_text(value)
    assert back == value
    assert isinstance(back.pairs[0], tuple)
    assert isinstance(back.inner.names, list)
    assert isinstance(back.folder, Path)
    assert isinstance(back.anything["pose"], list)


def test_an_unset_field_is_named():
    with pytest.raises(ValueError, match=r"config\.inner\.numbers is not set"):
        to_json(Outer(inner=Inner(numbers=tyro.MISSING)))


def test_a_value_without_json_form_is_named():
    with pytest.raises(TypeError, match=r"config\.anything\.f is a function"):
        to_json(Outer(anything={"f": lambda: None}))


def test_an_unknown_field_is_refused():
    data = to_json(Outer()) | {"colour": "red"}
    with pytest.raises(ValueError, match="Outer does not know: colour"):
        from_json(data)


def test_a_field_added_since_takes_its_default():
    data = to_json(Outer(required=7))
    del data["required"]
    assert from_json(data) == Outer()


@pytest.mark.parametrize(
    "name", ["no_such_module:Thing", "json:dumps", "json:Nothing", "builtins:dict"]
)
def test_a_type_that_is_no_configuration_is_refused(name):
    with pytest.raises(ValueError, match="cannot be imported|not a configuration dataclass"):
        from_json({"type": name})


def test_types_inside_containers_are_kept_or_refused():
    value = Mixed(named={"a": (1, 2)}, pair=(3, Path("x")))
    back = _through_text(value)
    assert back == value
    assert isinstance(back.named["a"], tuple)
    assert isinstance(back.pair[1], Path)
    with pytest.raises(TypeError, match="anything would not be read back equal"):
        to_json(Outer(anything={"pose": (0, 1)}))


def test_a_missing_required_field_is_named():
    with pytest.raises(ValueError, match="not a whole Mixed.*pair"):
        from_json({"type": f"{__name__}:Mixed"})

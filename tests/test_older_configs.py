"""Configurations of earlier versions are read: their fields renamed, translated or refused."""

import dataclasses
import json

import pytest
from tests.training.running import losses, tiny

from piston import older_configs, presets, serialization
from piston.older_configs import FIELDS, TYPES, Removed, Renamed
from piston.serialization import from_json, register, to_json
from piston.training.loop import train_loop


@register("test_group")
@dataclasses.dataclass(frozen=True)
class Group:
    keep: int = 1


@register("test_options")
@dataclasses.dataclass(frozen=True)
class Options:
    steps: int = 3
    group: Group = Group()
    # The name of a field of another class that is gone.
    patience: int = 0


def grouped(fields, old):
    rest = {key: value for key, value in fields.items() if key != old}
    return {**rest, "group": {"type": "test_group", "keep": fields[old]}}


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    rows = {
        "num_steps": Renamed("steps"),
        "test_options.keep": grouped,
        "test_options.limits": Removed([1, 2], "Give limits to the robot."),
        "patience": Removed(None, "Stop it yourself."),
        "test_other.steps": Removed(1, "Not of this class."),
    }
    monkeypatch.setattr(older_configs, "FIELDS", {**FIELDS, **rows})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_steps": 7}, Options(steps=7)),
        ({"keep": 4, "steps": 5}, Options(steps=5, group=Group(4))),
        ({"limits": [1, 2]}, Options()),
        ({"patience": 9}, Options(patience=9)),  # its own field
    ],
    ids=["renamed", "translated", "without effect", "a field that it has"],
)
def test_an_older_field_is_read(fields, expected):
    assert from_json({"type": "test_options", **fields}) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"type": "test_options", "limits": [1, 3]},
            r"a/config\.json\.limits is \[1, 3\]\. Give limits to the robot\.$",
        ),
        ({"type": "test_group", "patience": 3}, r"patience is 3\. Stop it yourself\.$"),
        ({"type": "test_group", "limits": [1, 2]}, "Group does not know: limits"),
        ({"type": "test_options", "num_steps": 1, "steps": 2}, "does not know: num_steps"),
    ],
    ids=["of a class", "of any class", "of another class", "given twice"],
)
def test_an_older_field_is_refused_in_a_sentence(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(data, where="a/config.json")


def test_each_row_leads_somewhere():
    """An old field is one no longer, and what is renamed has its new name."""
    presets.names()
    registered = serialization._classes.items()
    classes = {name: cls for name, cls in registered if cls.__module__.startswith("piston.")}
    fields = {f"{name}.{f.name}" for name, cls in classes.items() for f in dataclasses.fields(cls)}
    names = {name.partition(".")[2] for name in fields}
    assert set(TYPES.values()) <= classes.keys()
    for old, change in FIELDS.items():
        kind, dot, _ = old.rpartition(".")
        assert old not in (fields if dot else names), f"{old} is still a field"
        if isinstance(change, Renamed):
            new = f"{kind}.{change.new}" if dot else change.new
            assert new in (fields if dot else names), f"{new} is no field"


def test_a_run_with_a_removed_option_is_resumed_or_refused(tmp_path):
    config = tiny(tmp_path, num_train_steps=2)
    folder = train_loop(config).parent
    path = folder / "run.json"
    resumed = dataclasses.replace(config, num_train_steps=3, resume=True)
    data = {**to_json(config), "patience": 5}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"run\.json\.patience is 5\. Stop it yourself\.$"):
        train_loop(resumed)
    assert len(losses(folder)) == 2
    path.write_text(json.dumps(data | {"patience": None}))
    train_loop(resumed)
    assert len(losses(folder)) == 3

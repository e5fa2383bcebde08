"""Configurations survive JSON; what cannot is refused by name."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from piston import presets
from piston.config import DataConfigFactory
from piston.serialization import from_json, register, to_json


@register("test_inner")
@dataclasses.dataclass(frozen=True)
class Inner:
    numbers: tuple[int, ...] = (1, 2)
    names: list[str] | None = None


@register("test_outer")
@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    pairs: tuple[tuple[str, float], ...] = (("a", 1.5),)
    inners: tuple[Inner, ...] = (Inner((3,)),)
    folder: Path | None = Path("x/y")
    anything: dict[str, Any] | None = None
    required: int = 0


@register("test_mixed")
@dataclasses.dataclass(frozen=True)
class Mixed:
    pair: tuple[int, Path]
    named: dict[str, tuple[int, ...]] | None = None


def _through_text(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_read_back_equal(name):
    preset = presets.get(name)
    filled = dataclasses.replace(preset, exp_name="run")
    if isinstance(preset.data, DataConfigFactory):  # not a mixture
        data = dataclasses.replace(preset.data, repo_id="somebody/something")
        filled = dataclasses.replace(filled, data=data)
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
    "name",
    ["no_such_module:Thing", "json:dumps", "piston.config:DataConfig", "pi_0", ["pi0"], None],
)
def test_an_unregistered_type_is_refused(name):
    with pytest.raises(
        ValueError, match=r"is of type .* not registered.*PISTON_PRESETS=/path/to/\w+.py"
    ):
        from_json({"type": name})


def test_reading_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'hostile:Thing', which is not registered"):
        from_json({"type": "hostile:Thing"})
    assert "hostile" not in sys.modules


def test_a_class_of_a_user_is_found_by_the_name_of_version_0_1_0():
    assert from_json({"type": f"{__name__}:Inner"}) == Inner()


def test_a_name_belongs_to_one_class():
    with pytest.raises(ValueError, match="'pi0' is the registered name of piston.models.configs:"):
        register("pi0")(dataclasses.make_dataclass("Other", []))
    with pytest.raises(TypeError, match="put @register above @dataclass"):
        register("other")(type("Other", (), {}))


def test_a_class_without_a_name_is_not_written():
    with pytest.raises(TypeError, match=r'config\.anything\.x is a Other.*@register\("a_name"\)'):
        to_json(Outer(anything={"x": dataclasses.make_dataclass("Other", [])()}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("required", "7", r"config\.required is '7'; expected int"),
        ("required", True, "required is True; expected int"),
        ("required", None, "required is None; expected int"),
        ("required", {"a": 1}, "required is a dict; expected int"),
        ("inner", 3, "inner is 3; expected Inner"),
        ("inner", {"numbers": []}, "inner is a dict; expected Inner"),
        ("inner", {"type": "test_mixed", "pair": [1, "x"]}, "inner is a dict; expected Inner"),
        (
            "inner",
            {"type": "test_inner", "numbers": [1, "b"]},
            r"inner\.numbers\[1\] is 'b'; ",
        ),
        ("pairs", [["a", 1.5, 2]], r"pairs\[0\] is a list; expected tuple\[str, float\]"),
        ("pairs", "ab", "pairs is 'ab'; expected tuple"),
        ("folder", 3, "folder is 3; expected "),
        ("anything", [1], "anything is a list; expected "),
    ],
)
def test_a_value_of_the_wrong_type_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        from_json(to_json(Outer()) | {field: value})


@pytest.mark.parametrize("data", [[], "train", None, {}, {"name": "x"}])
def test_what_is_no_train_config_is_refused(data):
    with pytest.raises(ValueError, match=r"config\.json: train is .*; expected TrainConfig"):
        presets.train_config_from_json(data, "config.json: train")


def test_a_setting_out_of_range_names_its_place():
    data = to_json(dataclasses.replace(presets.get("debug"), exp_name="x"))
    data["model"]["action_dim"] = 0
    with pytest.raises(ValueError, match=r"a/config\.json\.model is not a valid .*action_dim"):
        presets.train_config_from_json(data, "a/config.json")


def test_types_inside_containers_are_kept_or_refused():
    value = Mixed(named={"a": (1, 2)}, pair=(3, Path("x")))
    back = _through_text(value)
    assert back == value
    assert isinstance(back.named["a"], tuple)
    assert isinstance(back.pair[1], Path)
    with pytest.raises(TypeError, match="anything would not be read back equal"):
        to_json(Outer(anything={"pose": (0, 1)}))


def test_a_missing_required_field_is_named():
    with pytest.raises(ValueError, match="not a valid Mixed.*pair"):
        from_json({"type": f"{__name__}:Mixed"})


def test_fields_of_0_1_0_are_read_by_their_old_names():
    config = dataclasses.replace(presets.get("pi0_libero"), exp_name="x", allow_missing=("*lora*",))
    data = dataclasses.replace(config.data, extra_datasets=("a/b",))
    config = dataclasses.replace(config, data=data)
    written = to_json(config)
    written["may_be_new"] = written.pop("allow_missing")
    written["data"]["more_sets"] = written["data"].pop("extra_datasets")
    assert from_json(written) == config
    written["allow_missing"] = []
    with pytest.raises(ValueError, match="does not know: may_be_new"):
        from_json(written)

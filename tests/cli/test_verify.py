"""`piston verify` finds what is wrong, and only that."""

import json
import shutil

import numpy as np
import pytest

from piston.cli import main
from piston.verification import close, equal


def test_the_reference_transforms_hold(reference, capsys):
    assert main(["verify", str(reference / "transforms.json")]) == 0
    shown = capsys.readouterr().out
    for name in ("aloha/adapt_True/delta/model_actions", "resize/0", "fast 0", "lr/default"):
        assert name in shown


def test_the_released_statistics_are_written_back_byte_for_byte(small_reference, capsys):
    assert main(["verify", str(small_reference / "norm_stats" / "trossen")]) == 0
    assert "all ok" in capsys.readouterr().out


@pytest.fixture
def numeric_case(small_reference, tmp_path):
    """The reference case without the prompts, which need a tokenizer's file."""
    facts = json.loads((small_reference / "transforms.json").read_text())
    del facts["prompts"], facts["fast"]
    (tmp_path / "case.json").write_text(json.dumps(facts))
    shutil.copy(small_reference / "transforms.npz", tmp_path / "case.npz")
    return tmp_path / "case.json"


def test_the_numerical_part_holds_everywhere(numeric_case):
    assert main(["verify", str(numeric_case)]) == 0


@pytest.mark.parametrize(
    "name",
    ["aloha/adapt_True/delta/robot_actions", "norm/normalized_quantile_True", "resize/2/out"],
)
def test_one_changed_number_is_found(numeric_case, name, capsys):
    arrays = dict(np.load(numeric_case.with_suffix(".npz")))
    arrays[name] = arrays[name] + np.ones_like(arrays[name])
    np.savez(numeric_case.with_suffix(".npz"), **arrays)
    assert main(["verify", str(numeric_case)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(wrong) == 1
    assert name.removesuffix("/out") in wrong[0]


def test_a_folder_of_cases_is_searched(numeric_case, capsys):
    assert main(["verify", str(numeric_case.parent)]) == 0
    assert "1 cases" in capsys.readouterr().out


def test_a_path_that_is_no_case_says_what_a_case_is(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 1
    assert "Known kinds: transforms" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_nan_and_shapes_are_never_fine():
    assert not close("x", np.array([np.nan]), np.array([1.0]), 1e9).ok
    assert not close("x", np.zeros(2), np.zeros(3), 1e9).ok
    assert not equal("x", [1, 2], [1, 3]).ok
    assert close("x", np.array([1000.1]), np.array([1000.0]), 1e-3, relative=True).ok


def test_a_case_in_which_nothing_is_known_fails(tmp_path, capsys):
    (tmp_path / "case.json").write_text("{}")
    np.savez(tmp_path / "case.npz", other=np.zeros(3))
    assert main(["verify", str(tmp_path / "case.json")]) == 1
    shown = capsys.readouterr().out
    assert "other" in shown
    assert "not understood" in shown


def test_a_missing_expectation_is_not_passed_over(numeric_case, capsys):
    arrays = dict(np.load(numeric_case.with_suffix(".npz")))
    del arrays["aloha/adapt_True/delta/state"]
    np.savez(numeric_case.with_suffix(".npz"), **arrays)
    assert main(["verify", str(numeric_case)]) == 1
    assert "aloha/adapt_True/delta/state" in capsys.readouterr().out

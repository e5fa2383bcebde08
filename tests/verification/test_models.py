"""The model cases hold through the product's own code, and one changed number is found."""

import json
import shutil

import numpy as np
import pytest

from piston import verification

CASES = ("pi0", "pi05", "pi0_lora", "pi0_fast")


@pytest.mark.parametrize("name", CASES)
def test_every_quantity_of_the_case_holds(small_reference, name):
    quantities = list(verification.replay(small_reference / "models" / name))
    assert [(q.name, q.error, q.note) for q in quantities if not q.ok] == []
    names = {q.name for q in quantities}
    assert "orbax loss" in names
    if name in ("pi0", "pi05"):
        for part in ("velocity", "sampled_actions", "losses", "loss of the mean"):
            assert {f"orbax {part}", f"safetensors {part}"} <= names


@pytest.fixture
def copied(small_reference, tmp_path):
    return shutil.copytree(small_reference / "models" / "pi0", tmp_path / "case")


def _wrong(case):
    return [q.name for q in verification.replay(case) if not q.ok]


@pytest.mark.parametrize("name", ["velocity", "sampled_actions", "positions", "prefix_tokens"])
def test_one_changed_output_is_found(copied, name):
    shutil.rmtree(copied / "params")
    (copied / "training.json").unlink()
    arrays = dict(np.load(copied / "case.npz"))
    arrays[f"out/{name}"].flat[0] += 1
    np.savez(copied / "case.npz", **arrays)
    assert _wrong(copied) == [f"safetensors {name}"]


@pytest.mark.parametrize(
    ("key", "name"), [("ema_loss_after_6_steps", "loss of the mean"), ("grad_norms", "norms")]
)
def test_one_changed_training_number_is_found(copied, key, name):
    shutil.rmtree(copied / "params")
    steps = json.loads((copied / "training.json").read_text())
    steps[key] = np.multiply(steps[key], 1.01).tolist()
    (copied / "training.json").write_text(json.dumps(steps))
    (wrong,) = _wrong(copied)
    assert name in wrong


def test_a_case_without_weights_or_of_an_unknown_family_fails(copied):
    shutil.rmtree(copied / "params")
    (copied / "model.safetensors").unlink()
    assert _wrong(copied) == ["weights"]
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model": "pi9"}))
    assert len(_wrong(copied)) == 1


def test_one_broken_case_does_not_stop_the_others(copied, small_reference, capsys):
    from piston.cli import main

    (copied / "case.npz").write_bytes(b"nonsense")
    good = small_reference / "norm_stats" / "trossen"
    assert main(["verify", str(copied), str(good)]) == 1
    shown = capsys.readouterr().out
    assert "1 wrong" in shown
    assert "bytes written back" in shown

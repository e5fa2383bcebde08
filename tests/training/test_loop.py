"""The loop from end to end, in this process: what a run leaves behind and what it refuses."""

import dataclasses
import json
import logging
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from piston import weights
from piston.data.samples import FakeDataset
from piston.training import loop, trackers
from piston.training.checkpoint import saved_steps
from piston.training.distributed import Processes
from piston.training.loop import TrainingStopped, train_loop

from .running import (
    assert_same_run,
    assert_same_tensors,
    losses,
    metrics,
    note_batches,
    state,
    tiny,
)
from .tiny_presets import FAST, PI0, PI05


def test_what_a_run_leaves_behind(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="piston")
    last = train_loop(tiny(tmp_path, save_interval=3))
    run = tmp_path / "tiny" / "run"
    assert last == run / "5"
    assert saved_steps(run) == [3, 5]
    assert [line["step"] for line in metrics(run)] == list(range(6))
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first.keys() == {
        *("step", "loss", "gradient_norm", "learning_rate"),
        *("samples_per_second", "waiting_for_data", "skipped_steps"),
    }
    assert first["learning_rate"] == pytest.approx(1e-2 / 3)  # peak / (warm-up + 1)
    assert 0 <= first["waiting_for_data"] <= 1
    with Image.open(run / "first_batch.png") as picture:
        assert picture.size == (2 * 32, 4 * 32)  # a column per camera, a row per sample
    assert "step 3/6  loss" in caplog.text
    assert " left" in caplog.text
    files = {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "manifest.json"} < files


def test_what_gets_served_is_the_mean_of_the_weights(tmp_path):
    last = train_loop(tiny(tmp_path, ema_decay=0.5))
    served, saved = weights.load_model(last).state_dict(), state(last)
    for name, value in served.items():
        assert torch.equal(value, saved[f"ema/{name}"])
    assert not torch.equal(saved["ema/suffix.state.bias"], saved["model/suffix.state.bias"])
    plain = train_loop(tiny(tmp_path, ema_decay=None, exp_name="plain"))
    served, saved = weights.load_model(plain).state_dict(), state(plain)
    assert not any(name.startswith("ema/") for name in saved)
    assert all(torch.equal(value, saved[f"model/{name}"]) for name, value in served.items())


@pytest.mark.parametrize("model", [PI0, PI05, FAST], ids=["pi0", "pi05", "fast"])
def test_cut_and_resumed_equals_never_cut(tmp_path, model, monkeypatch):
    """Here between two steps; `test_faults` cuts for real."""
    seen, changes = note_batches(monkeypatch), {"model": model, "save_interval": 3}
    train_loop(tiny(tmp_path / "uncut", num_train_steps=9, **changes))
    uncut_order = list(seen)
    seen.clear()
    train_loop(tiny(tmp_path / "cut", num_train_steps=6, **changes))
    train_loop(tiny(tmp_path / "cut", num_train_steps=9, **changes, resume=True))
    assert seen == uncut_order
    assert_same_run(tmp_path / "cut/tiny/run", tmp_path / "uncut/tiny/run", 8)


def test_means_of_an_interval_survive_a_cut(tmp_path):
    """The line of step 8 is the mean of steps 5 to 8, of which 5 and 6 came before the cut."""
    changes = {"num_train_steps": 9, "log_interval": 4, "save_interval": 6}
    train_loop(tiny(tmp_path / "uncut", **changes))
    cut = tmp_path / "cut" / "tiny" / "run"
    train_loop(tiny(tmp_path / "cut", **changes))
    (cut / "8").rename(cut / "8.gone")
    train_loop(tiny(tmp_path / "cut", resume=True, **changes))
    assert [line["step"] for line in metrics(cut)] == [0, 4, 8]
    assert_same_run(cut, tmp_path / "uncut" / "tiny" / "run", 8)


def test_bfloat16_resumes_bit_for_bit(tmp_path):
    model = dataclasses.replace(PI0, dtype="bfloat16")
    train_loop(tiny(tmp_path / "uncut", num_train_steps=8, model=model))
    train_loop(tiny(tmp_path / "cut", num_train_steps=4, model=model))
    train_loop(tiny(tmp_path / "cut", num_train_steps=8, model=model, resume=True))
    cut, uncut = tmp_path / "cut" / "tiny" / "run", tmp_path / "uncut" / "tiny" / "run"
    assert_same_run(cut, uncut, 7)


def test_resuming_needs_no_starting_weights(tmp_path):
    base = train_loop(tiny(tmp_path, exp_name="base"))
    moved = tmp_path / "moved"
    train_loop(tiny(tmp_path, weights=str(base), num_train_steps=4))
    base.rename(moved)
    train_loop(tiny(tmp_path, weights=str(base), num_train_steps=6, resume=True))


def test_resuming_another_model_names_what_differs(tmp_path):
    train_loop(tiny(tmp_path, save_interval=3))
    wider = dataclasses.replace(PI0, action_dim=9)
    with pytest.raises(ValueError, match=r"suffix.*\(saved: \(.*8.*\), now: \(.*9.*\)\)"):
        train_loop(tiny(tmp_path, model=wider, resume=True, num_train_steps=8))
    with pytest.raises(ValueError, match=r"ema/.*--ema-decay"):
        train_loop(tiny(tmp_path, ema_decay=None, resume=True, num_train_steps=8))
    with pytest.raises(ValueError, match="its seed is 42, now it is 1"):
        train_loop(tiny(tmp_path, seed=1, resume=True, num_train_steps=8))
    assert saved_steps(tmp_path / "tiny" / "run") == [3, 5]


def test_resuming_a_finished_run_does_nothing(tmp_path):
    last = train_loop(tiny(tmp_path))
    before = losses(last.parent)
    assert train_loop(tiny(tmp_path, resume=True)) == last
    assert train_loop(tiny(tmp_path, resume=True, num_train_steps=2)) == last
    assert losses(last.parent) == before


def test_every_start_is_written_down(tmp_path, monkeypatch):
    def starts():
        lines = (tmp_path / "tiny" / "run" / "history.jsonl").read_text().splitlines()
        return [(one["first_step"], one["command"]) for one in map(json.loads, lines)]

    program = tmp_path / "bin" / "piston"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr(sys, "argv", [str(program), "train", "tiny", "--exp-name", "a b"])
    command = "piston train tiny --exp-name 'a b'"
    train_loop(tiny(tmp_path, num_train_steps=4))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-u", "train.py"])
    for _ in range(2):  # the second time there is nothing to do
        train_loop(tiny(tmp_path, num_train_steps=6, resume=True))
    assert starts() == [(0, command), (4, "python -u train.py")]
    train_loop(tiny(tmp_path, overwrite=True))
    assert starts() == [(0, "python -u train.py")]


def test_resuming_what_never_saved_begins(tmp_path):
    (tmp_path / "tiny" / "run" / "3.partial").mkdir(parents=True)
    train_loop(tiny(tmp_path, resume=True))
    assert not (tmp_path / "tiny" / "run" / "3.partial").exists()
    assert len(losses(tmp_path / "tiny" / "run")) == 6


def test_resuming_what_never_saved_keeps_what_is_not_its_own(tmp_path):
    run = tmp_path / "tiny" / "run"
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 9.0}\n')
    (run / "wandb_id.txt").write_text("of the run before")
    train_loop(tiny(tmp_path, resume=True, num_train_steps=2))
    assert (run / "notes.txt").read_text() == "mine"
    assert [line["step"] for line in metrics(run)] == [0, 1]
    assert 9.0 not in losses(run)
    assert not (run / "wandb_id.txt").exists()


def test_what_changed_since_the_last_start_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="piston")
    train_loop(tiny(tmp_path, num_train_steps=2))
    train_loop(tiny(tmp_path, num_train_steps=4, resume=True))
    assert "changed since" not in caplog.text
    slower = dataclasses.replace(tiny(tmp_path).lr_schedule, peak_lr=1e-3)
    changes = {"batch_size": 2, "lr_schedule": slower}
    train_loop(tiny(tmp_path, num_train_steps=6, resume=True, **changes))
    (line,) = [r.getMessage() for r in caplog.records if "changed since" in r.getMessage()]
    assert (
        line == "changed since the last start: lr_schedule.peak_lr 0.01 → 0.001, batch_size 4 → 2"
    )
    (tmp_path / "tiny" / "run" / "run.json").write_text("")  # nothing to compare with
    train_loop(tiny(tmp_path, num_train_steps=7, resume=True))


def test_what_is_cheap_to_see_is_seen_before_data(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("data were opened")

    monkeypatch.setattr(loop, "_open_data", never)
    with pytest.raises(FileNotFoundError, match="nope"):
        train_loop(tiny(tmp_path, weights=str(tmp_path / "nope")))
    with pytest.raises(ValueError, match="'vml.*' matches no parameter"):
        train_loop(tiny(tmp_path, freeze=("vml.*",)))
    with pytest.raises(ValueError, match="Nothing is left to train"):
        train_loop(tiny(tmp_path, freeze=("*",)))


@pytest.mark.parametrize(
    ("keep_last", "keep_period", "kept"),
    [(1, None, [9]), (3, None, [6, 8, 9]), (1, 4, [4, 8, 9]), (2, 4, [4, 8, 9])],
)
def test_which_checkpoints_are_kept(tmp_path, keep_last, keep_period, kept):
    changes = {"keep_last": keep_last, "keep_period": keep_period}
    train_loop(tiny(tmp_path, num_train_steps=10, save_interval=2, **changes))
    assert saved_steps(tmp_path / "tiny" / "run") == kept
    assert not list((tmp_path / "tiny" / "run").glob("*.removed"))


def test_a_run_is_not_lost_by_mistake(tmp_path):
    last = train_loop(tiny(tmp_path))
    with pytest.raises(FileExistsError, match="--resume .* --overwrite .* --exp-name"):
        train_loop(tiny(tmp_path))
    with pytest.raises(FileNotFoundError):  # what is wrong shows before anything is deleted
        train_loop(tiny(tmp_path, overwrite=True, weights=str(tmp_path / "none")))
    assert last.exists()
    train_loop(tiny(tmp_path, overwrite=True, num_train_steps=2))
    assert saved_steps(last.parent) == [1]
    assert len(losses(last.parent)) == 2


def test_overwrite_replaces_only_a_run(tmp_path):
    run = tmp_path / "tiny" / "run"
    run.mkdir(parents=True)
    witness = run / "witness"
    for name in ("notes.txt", "run.json"):  # also of another program
        (run / name).write_text('{"steps": 3}')
        witness.write_text("precious")
        with pytest.raises(FileExistsError, match=r"not a run \(it has no run\.json"):
            train_loop(tiny(tmp_path, overwrite=True))
        assert witness.read_text() == "precious"


def test_overwrite_keeps_a_run_that_holds_an_input(tmp_path):
    last = train_loop(tiny(tmp_path))
    with pytest.raises(ValueError, match=f"contains {last}, which is read"):
        train_loop(tiny(tmp_path, overwrite=True, weights=str(last)))
    (tmp_path / "link").symlink_to(last)
    for place in ("file://{}/link", "FILE://localhost{}/link", "file://{}/%6Cink"):
        with pytest.raises(ValueError, match="contains .*link, which is read"):
            train_loop(tiny(tmp_path, overwrite=True, weights=place.format(tmp_path)))
    assert last.exists()
    assert sorted(path.name for path in last.parent.parent.iterdir()) == [".run.lock", "run"]


def test_a_run_belongs_to_one_process(tmp_path, monkeypatch):
    refused = []

    def step(self, batch, number, *more):  # noqa: ARG001
        with pytest.raises(FileExistsError, match="Another process is training"):
            train_loop(tiny(tmp_path, resume=True))
        refused.append(number)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt):
        train_loop(tiny(tmp_path))
    assert refused == [0]


class Spoilt(FakeDataset):
    """Some samples make a loss that is not finite."""

    bad = frozenset()

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index in self.bad:
            sample["actions"][2, 1] = np.inf
        return sample


def _spoil(monkeypatch, bad):
    class Some(Spoilt):
        pass

    Some.bad = bad
    monkeypatch.setattr(loop, "open_training_data", lambda _, model, **__: Some(model))


def test_steps_that_are_not_finite_are_skipped_and_told_of(tmp_path, monkeypatch, caplog):
    seen = note_batches(monkeypatch)
    train_loop(tiny(tmp_path, exp_name="good"))
    bad = seen[2][1][1]  # the second sample of step 2
    _spoil(monkeypatch, {bad})
    train_loop(tiny(tmp_path))
    run = tmp_path / "tiny" / "run"
    lines = metrics(run)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert "loss" not in lines[2]
    assert [line["loss"] for line in lines[:2]] == losses(tmp_path / "tiny" / "good")[:2]
    assert "Step 2 skipped" in caplog.text
    frames = [f"0/{index}{' (!)' if index == bad else ''}" for index in seen[2][1]]
    assert ", ".join(frames) in caplog.text
    assert all(torch.isfinite(value).all() for value in state(run / "5").values())
    json.loads((run / "metrics.jsonl").read_text().splitlines()[2], parse_constant=pytest.fail)


def test_too_many_skipped_steps_end_the_run_with_advice(tmp_path, monkeypatch):
    train_loop(tiny(tmp_path, num_train_steps=4))
    _spoil(monkeypatch, range(1024))
    monkeypatch.setattr(trackers, "MAX_SKIPPED_STEPS", 4)
    changes = {"num_train_steps": 20, "save_interval": 3}
    with pytest.raises(TrainingStopped, match="4 steps in a row .*peak-lr.*--resume") as stopped:
        train_loop(tiny(tmp_path, **changes, resume=True))
    assert stopped.value.exit_code == 1
    assert saved_steps(tmp_path / "tiny" / "run") == [3, 6]


def test_too_many_skipped_steps_end_the_run_between_two_logs(tmp_path, monkeypatch):
    seen = note_batches(monkeypatch)
    _spoil(monkeypatch, range(1024))
    with pytest.raises(TrainingStopped, match="10 steps in a row"):
        train_loop(tiny(tmp_path, num_train_steps=40, log_interval=30))
    assert len(seen) <= 11


def test_results_that_are_read_late_are_the_same(tmp_path, monkeypatch):
    seen = note_batches(monkeypatch)
    train_loop(tiny(tmp_path, exp_name="good", num_train_steps=7))
    _spoil(monkeypatch, {seen[2][1][1]})
    train_loop(tiny(tmp_path, exp_name="often", num_train_steps=7, save_interval=3))
    train_loop(tiny(tmp_path, exp_name="late", num_train_steps=7, log_interval=6, save_interval=50))
    often, late = (metrics(tmp_path / "tiny" / name) for name in ("often", "late"))
    assert [line["step"] for line in late] == [0, 6]
    mean = np.mean([line["loss"] for line in often[1:] if "loss" in line])
    assert late[1]["loss"] == pytest.approx(mean, rel=1e-12)
    assert late[1]["skipped_steps"] == often[-1]["skipped_steps"] == 1
    one, other = (state(tmp_path / "tiny" / name / "6") for name in ("often", "late"))
    assert_same_tensors(one, other)


def test_processes_exchange_one_message_per_step(tmp_path, monkeypatch):
    calls = []
    original = Processes.sum

    def counted(self, *values):
        calls.append(values)
        return original(self, *values)

    monkeypatch.setattr(Processes, "sum", counted)
    train_loop(tiny(tmp_path, num_train_steps=9, log_interval=100, save_interval=100))
    # One per step, one each for reading the results of the first and the last log, one for saving.
    assert len(calls) == 9 + 2 + 1


def test_masks_need_to_know_the_robot(tmp_path):
    with pytest.raises(ValueError, match="--mask-padded-dims needs statistics"):
        train_loop(tiny(tmp_path, mask_padded_dims=True))


def test_validation_needs_episodes(tmp_path):
    with pytest.raises(ValueError, match="random samples have no episodes"):
        train_loop(tiny(tmp_path, validation_episodes=1))


def test_a_run_in_a_thread(tmp_path):
    """Where Python delivers no signals."""
    thread = threading.Thread(target=train_loop, args=(tiny(tmp_path, num_train_steps=2),))
    thread.start()
    thread.join()
    assert saved_steps(tmp_path / "tiny" / "run") == [1]

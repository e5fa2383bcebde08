"""Episodes that cannot be used: found early where that is cheap, and left out without a loss."""

import dataclasses
import shutil

import numpy as np
import pytest

from piston import assets
from piston.training import loop, trackers
from piston.training.checkpoint import saved_steps
from piston.training.loop import TrainingStopped, train_loop

from .recording import recorded, spoil
from .running import assert_same_run, losses, metrics, note_batches, run_together, state, tiny
from .test_loop import Spoilt

FRAMES = 8


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("data"), episodes=4, frames=FRAMES)


def _copy(data, folder):
    """The same set in a place of its own, to be spoilt."""
    shutil.copytree(data["data"].repo_id, folder)
    return {**data, "data": dataclasses.replace(data["data"], repo_id=str(folder))}


def _choose(data, episodes):
    return {**data, "data": dataclasses.replace(data["data"], episodes=episodes)}


def test_numbers_that_are_not_finite_are_found_before_any_frame(tmp_path, sound, monkeypatch):
    data = _copy(sound, tmp_path / "cups")
    spoil(tmp_path / "cups", "state", FRAMES + 3, [np.nan] * 8)
    spoil(tmp_path / "cups", "actions", 3 * FRAMES, [np.inf] + [0.0] * 6)

    def never(*_, **__):
        raise AssertionError("something slow happened")

    with monkeypatch.context() as patched:
        for slow in ("open_training_data", "_initial_model"):
            patched.setattr(loop, slow, never)
        with pytest.raises(ValueError, match=r"episode 1 \(frame 3\), episode 3 \(frame 0\)") as e:
            train_loop(tiny(tmp_path, **data))
        assert "--data.episodes '!1,!3'" in str(e.value)
        with pytest.raises(ValueError, match="--data.episodes '0:2,!1'"):
            train_loop(tiny(tmp_path, **_choose(data, "0:2"), validation_episodes=1))
    train_loop(tiny(tmp_path, **_choose(data, "!1,!3")))


def test_what_the_robot_does_not_use_may_be_anything(tmp_path, sound):
    data = _copy(sound, tmp_path / "cups")
    spoil(tmp_path / "cups", "timestamp", 3, np.nan)
    train_loop(tiny(tmp_path, **data))


def test_resuming_with_fewer_episodes(tmp_path, sound, monkeypatch, caplog):
    seen = note_batches(monkeypatch)
    train_loop(tiny(tmp_path, **sound, num_train_steps=4))
    saved, before = state(tmp_path / "tiny/run/3"), losses(tmp_path / "tiny/run")
    seen.clear()
    changed = {**_choose(sound, "!1"), "num_train_steps": 12, "resume": True}
    caplog.set_level("INFO", logger="piston")
    last = train_loop(tiny(tmp_path, **changed))
    told = [r for r in caplog.records if r.levelname == "WARNING"]
    assert ["samples_per_epoch was 32, now it is 24" in r.getMessage() for r in told] == [True]
    assert "changed since the last start: data.episodes None → !1" in caplog.text
    assert [step for step, _ in seen] == list(range(4, 12))
    assert {index // FRAMES for _, batch in seen for index in batch} == {0, 2, 3}
    assert losses(last.parent)[:4] == before
    name = "optimizer/suffix.state.weight/step"
    assert (saved[name], state(last)[name]) == (4, 12)  # the same optimizer goes on


class Unreadable(Spoilt):
    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} cannot be decoded.")
        return super().__getitem__(index)


@pytest.mark.parametrize("save_interval", [100, 3], ids=["unsaved", "just saved"])
def test_what_was_learned_is_saved_before_an_error_of_the_data(
    tmp_path, monkeypatch, save_interval
):
    changes = {"save_interval": save_interval}
    seen = note_batches(monkeypatch)
    uncut = train_loop(tiny(tmp_path / "uncut", **changes)).parent
    bad = seen[4][1][2]
    with monkeypatch.context() as patched:
        patched.setattr(Unreadable, "bad", {bad})
        patched.setattr(loop, "open_training_data", lambda _, model, **__: Unreadable(model))
        with pytest.raises(ValueError, match=f"sample {bad} cannot be decoded") as failed:
            train_loop(tiny(tmp_path, **changes))
    (advice,) = failed.value.__notes__
    assert "Step 3 is saved" in advice
    assert "--resume --data.episodes '!N'" in advice
    assert saved_steps(tmp_path / "tiny/run") == [3]
    train_loop(tiny(tmp_path, resume=True, **changes))
    assert_same_run(tmp_path / "tiny/run", uncut, 5)


def test_too_many_skipped_steps_are_ended_by_leaving_episodes_out(tmp_path, sound, monkeypatch):
    """As the message says."""
    data = _copy(sound, tmp_path / "cups")
    spoil(tmp_path / "cups", "actions", 5, [3e38] * 7)  # finite, but not what becomes of it
    monkeypatch.setattr(trackers, "MAX_SKIPPED_STEPS", 1)
    changes = {"num_train_steps": 20}
    with pytest.raises(TrainingStopped, match="--resume --data.episodes '!N'.*--resume --lr-sch"):
        train_loop(tiny(tmp_path, **data, **changes))
    train_loop(tiny(tmp_path, **_choose(data, "!0"), **changes, resume=True))
    assert metrics(tmp_path / "tiny/run")[-1]["step"] == 19


@pytest.mark.slow
def test_one_of_two_processes_cannot_read_its_data(tmp_path, sound, monkeypatch):
    """Both of them save, and go on without the episode."""
    monkeypatch.setenv("PISTON_HOME", str(assets.home()))
    data = _copy(sound, tmp_path / "cups")
    seen = note_batches(monkeypatch)
    train_loop(tiny(tmp_path / "one", **sound, batch_size=8))
    step, bad = next((step, index) for step, batch in seen for index in batch if step == 2)
    spoil(tmp_path / "cups", "image", bad, {"bytes": b"no picture", "path": None})
    without = _choose(data, f"!{bad // FRAMES}")
    changes = {"batch_size": 8, "save_interval": 100}
    configs = []
    for sharding in ("ddp", "fsdp"):
        alike = {**changes, "sharding": sharding, "exp_name": sharding}
        configs.append(tiny(tmp_path, **data, **alike))
        configs.append(tiny(tmp_path, **without, **alike, resume=True))
    results = run_together(configs, tmp_path)
    for failed, resumed in (results[:2], results[2:]):
        assert f"episode {bad // FRAMES}" in failed["error"] or "Another process" in failed["error"]
        assert resumed["checkpoint"].endswith("/5")
    for sharding in ("ddp", "fsdp"):
        assert saved_steps(tmp_path / "tiny" / sharding) == [step - 1, 5]
        assert len(losses(tmp_path / "tiny" / sharding)) == 6

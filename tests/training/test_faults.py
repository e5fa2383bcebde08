"""Runs that are cut: whatever happens, the next start goes on as if nothing had."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from piston.training import checkpoint
from piston.training.checkpoint import saved_steps
from piston.training.loop import train_loop

from .running import (
    assert_same_run,
    command,
    losses,
    metrics,
    started,
    tiny,
    wait_for,
)
from .tiny_presets import SLOW_TO_SAVE, TINY

STEPS = 40


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uncut")
    return train_loop(tiny(folder, num_train_steps=STEPS, save_interval=7)).parent


def _resume(folder, **changes):
    return train_loop(tiny(folder, resume=True, num_train_steps=STEPS, save_interval=7, **changes))


def _options(*more):
    return (f"--num-train-steps={STEPS}", "--save-interval=7", *more)


def test_killed_during_a_step(tmp_path, uncut):
    run = tmp_path / "tiny" / "run"
    with started(command(tmp_path, *_options())) as process:
        wait_for(lambda: len(losses(run)) > 17, process)
        process.kill()
    assert 7 in saved_steps(run)
    assert len(losses(run)) < STEPS
    _resume(tmp_path)
    assert_same_run(run, uncut, STEPS - 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop(tmp_path, uncut, number, code):
    """The whole group gets the signal, as from torchrun and clusters: data workers as well."""
    run = tmp_path / "tiny" / "run"
    with started(command(tmp_path, *_options("--num-workers=1"))) as process:
        wait_for(lambda: len(losses(run)) > 3, process)
        os.killpg(process.pid, number)
        errors = process.communicate(timeout=200)[1]
    assert process.returncode == code, errors
    step = metrics(run)[-1]["step"]
    assert saved_steps(run)[-1] == step < STEPS - 1
    assert f"Stopped by {number.name} after step {step}, which is saved." in errors
    assert "--resume" in errors.splitlines()[-1]
    _resume(tmp_path)
    assert_same_run(run, uncut, STEPS - 1)


def test_killed_during_a_save(tmp_path):
    changes = {"model": SLOW_TO_SAVE, "name": "tiny_slow_to_save", "save_interval": 2}
    run = tmp_path / "tiny_slow_to_save" / "run"
    arguments = command(tmp_path, "--save-interval=2", preset="tiny_slow_to_save")
    with started(arguments) as process:
        wait_for(lambda: saved_steps(run) == [2], process)
        wait_for(lambda: list(run.glob("4.partial/train_state/*.distcp")), process)
        process.kill()
    assert (run / "4.partial").exists()
    assert saved_steps(run) == [2]
    train_loop(tiny(tmp_path, resume=True, **changes))
    assert not list(run.glob("*.partial"))
    other = tmp_path / "uncut"
    train_loop(tiny(other, **changes))
    assert_same_run(run, other / "tiny_slow_to_save" / "run", 5)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit in the weights": lambda step: _flip(step / "model.safetensors"),
    "a flipped bit in the state": lambda step: _flip(step / "train_state" / "__0_0.distcp"),
    "cut off": lambda step: os.truncate(step / "model.safetensors", 100),
    "a missing file": lambda step: (step / "train_state" / ".metadata").unlink(),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "an empty manifest": lambda step: (step / "manifest.json").write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, uncut, damage, caplog):
    caplog.set_level("INFO", logger="piston")
    run = tmp_path / "tiny" / "run"
    shutil.copytree(uncut, run)
    damage(run / str(STEPS - 1))
    _resume(tmp_path)
    assert f"Checkpoint {run / str(STEPS - 1)} is not used: " in caplog.text
    assert "after step 35" in caplog.text
    assert (run / f"{STEPS - 1}.damaged" / "config.json").exists()
    assert_same_run(run, uncut, STEPS - 1)


def test_only_damaged_checkpoints_are_told_of(tmp_path, uncut):
    run = tmp_path / "tiny" / "run"
    shutil.copytree(uncut, run)
    for step in saved_steps(run):
        _flip(run / str(step) / "model.safetensors")
    with pytest.raises(ValueError, match="None of the checkpoints .* is whole.*--overwrite"):
        _resume(tmp_path)
    assert saved_steps(run)  # nothing is deleted unasked


def test_files_named_like_unfinished_checkpoints_do_not_block_a_resume(tmp_path, uncut):
    run = tmp_path / "tiny" / "run"
    train_loop(tiny(tmp_path, num_train_steps=8, save_interval=7))
    names = ("x.partial", "5.partial", "14.partial", "14.removed", "9.partial.other")
    for name in names:
        (run / name).write_text(f"witness {name}")
    (run / "9.partial").write_text("another")
    (run / "5 notes.partial").mkdir()
    (run / "6.partial" / "train_state").mkdir(parents=True)
    _resume(tmp_path)
    assert not (run / "6.partial").exists()
    assert (run / "5 notes.partial").is_dir()
    moved = {name: f"{name}.other" for name in ("5.partial", "14.partial", "14.removed")}
    for name in names:
        assert (run / moved.get(name, name)).read_text() == f"witness {name}"
    assert (run / "9.partial.other~").read_text() == "another"
    assert_same_run(run, uncut, STEPS - 1)


@contextmanager
def _small_disk(folder, size):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


FULL = {
    "model": dataclasses.replace(SLOW_TO_SAVE, vocab_size=30_000),
    "save_interval": 2,
    "num_train_steps": 8,
    "keep_last": 1,
}


def test_a_full_disk(tmp_path, caplog, monkeypatch):
    """Room for one checkpoint and a half."""
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.01)
    monkeypatch.setattr(checkpoint, "_ATTEMPTS", 2)
    with _small_disk(tmp_path / "disk", "16m") as disk:
        run = disk / "tiny" / "run"
        with pytest.raises(OSError, match=r"0\.0 GB.*No space left.*--resume, after step 2") as end:
            train_loop(tiny(disk, **FULL))
        assert str(run) in str(end.value)
        reports = [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]
        # 4, 6: training went on; 7 was the last, and tried three times.
        assert ["the next save tries again" in line for line in reports] == [True] * 2 + [False] * 3
        assert caplog.text.count("is tried again in 0 seconds") == 2
        assert len(losses(run)) == 8
        assert saved_steps(run) == [2]
        assert not list(run.glob("*.partial"))
        _enlarge(disk)
        train_loop(tiny(disk, resume=True, **FULL))
        train_loop(tiny(tmp_path / "uncut", **FULL))
        assert saved_steps(run) == [7]
        assert_same_run(run, tmp_path / "uncut" / "tiny" / "run", 7)


def test_room_made_in_time_saves_the_last_step(tmp_path, monkeypatch):
    with _small_disk(tmp_path / "disk", "16m") as disk:
        monkeypatch.setattr(checkpoint.time, "sleep", lambda _: _enlarge(disk))
        last = train_loop(tiny(disk, **FULL))
        train_loop(tiny(tmp_path / "uncut", **FULL))
        assert_same_run(last.parent, tmp_path / "uncut" / "tiny" / "run", 7)


def _enlarge(disk):
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


@pytest.mark.slow
def test_two_processes_are_stopped_and_one_of_two_dies(tmp_path):
    run = tmp_path / "tiny" / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Two processes round sums differently; larger steps would make that 100 times larger.
    rates = ("--lr-schedule.peak-lr=1e-3", "--lr-schedule.decay-lr=1e-4")
    train = command(tmp_path, *_options("--sharding=ddp", "--resume", *rates))[1:]
    with started([*torchrun, "--nproc-per-node=2", *train]) as process:
        wait_for(lambda: len(losses(run)) > 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) != 0
    stopped = saved_steps(run)[-1]
    assert stopped == metrics(run)[-1]["step"] < STEPS - 1
    with started([*torchrun, "--nproc-per-node=2", *train]) as process:
        wait_for(lambda: len(losses(run)) > stopped + 9, process)
        psutil.Process(process.pid).children()[-1].kill()
        assert process.wait(timeout=200) != 0
    assert stopped < len(losses(run)) < STEPS
    schedule = dataclasses.replace(TINY.lr_schedule, peak_lr=1e-3, decay_lr=1e-4)
    _resume(tmp_path, lr_schedule=schedule)
    changes = {"num_train_steps": STEPS, "save_interval": 7, "lr_schedule": schedule}
    uncut = train_loop(tiny(tmp_path / "uncut", **changes)).parent
    assert losses(run) == pytest.approx(losses(uncut), rel=1e-5)

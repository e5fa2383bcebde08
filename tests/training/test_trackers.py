"""Where a run's numbers go, and what a person sees of it."""

import json
import logging
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from piston.cli import main
from piston.training.checkpoint import saved_steps
from piston.training.loop import train_loop
from piston.training.step import StepOutput
from piston.training.trackers import (
    Meter,
    Trackers,
    flat,
    json_lines,
    read_metrics,
    remove_metrics_after,
)

from .running import command, environment, losses, metrics, tiny
from .test_step import make_batch, make_trainer


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) for step in range(4)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo')  # killed while it wrote
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]
    remove_metrics_after(path, 2)
    assert path.read_text() == "".join(line + "\n" for line in lines[:3])
    remove_metrics_after(tmp_path / "none", 2)


def test_what_cannot_be_written_does_not_end_the_run(caplog):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    trackers = Trackers({"file": json_lines(full)})
    trackers.log(3, {"loss": 1.0})
    trackers.close()
    assert "Metrics of step 3 were not written: [Errno 28]" in caplog.text


def test_a_line_that_is_not_text_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 0.5}\n{"step": 1, "\xff\xfe": 1}\n[]\n{"loss": 1}\n')
    assert read_metrics(path) == [{"step": 0, "loss": 0.5}]
    remove_metrics_after(path, 0)
    assert path.read_text() == '{"step": 0, "loss": 0.5}\n'


def broken_log(step, metrics):  # noqa: ARG001
    raise RuntimeError("the service is gone")


def broken_close():
    raise RuntimeError("the service is still gone")


def test_a_service_that_fails_is_told_of_once(tmp_path, caplog):
    trackers = Trackers(
        {"broken": (broken_log, broken_close), "file": json_lines(tmp_path / "metrics.jsonl")}
    )
    for step in range(3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert caplog.text.count("the service is") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_numbers_per_dimension_become_numbers():
    assert flat({"a": 1.0, "b": {"x": 2.0, "y": 3.0}}) == {"a": 1.0, "b/x": 2.0, "b/y": 3.0}


def _scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs piston[track]")
    changes = {"tracking": ("tensorboard",), "save_interval": 2}
    train_loop(tiny(tmp_path, **changes))
    run = tmp_path / "tiny" / "run"
    (run / "5").rename(run / "5.gone")  # as if cut after step 4
    train_loop(tiny(tmp_path, resume=True, **changes))
    found = _scalars(run / "tensorboard")
    assert [step for step, _ in found] == list(range(6))
    assert [value for _, value in found] == pytest.approx(losses(run))


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs piston[track]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_loop(tiny(tmp_path, tracking=("wandb",), num_train_steps=2))
    run = tmp_path / "tiny" / "run"
    identity = (run / "wandb_id.txt").read_text()
    assert list((run / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))


def test_an_earlier_run_outlives_a_service_that_lets_nobody_in(tmp_path):
    pytest.importorskip("wandb", reason="needs piston[track]")
    last = train_loop(tiny(tmp_path))
    refused = subprocess.run(
        command(tmp_path, "--overwrite", "--tracking", "wandb"),
        env=environment(HOME=str(tmp_path), WANDB_API_KEY="", WANDB_MODE="online"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1
    assert "wandb login" in refused.stderr.splitlines()[-1]
    assert "WANDB_MODE=offline" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    assert (last / "model.safetensors").exists()
    assert len(losses(last.parent)) == 6


def test_a_tracker_that_is_not_installed_is_told_of_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install 'piston\\[track\\]'"):
        train_loop(tiny(tmp_path, tracking=("wandb",)))
    assert not list(tmp_path.iterdir())


def test_runs_are_listed(tmp_path, capsys):
    train_loop(tiny(tmp_path, exp_name="first"))
    train_loop(tiny(tmp_path, exp_name="second", num_train_steps=2))
    with (tmp_path / "tiny" / "second" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # at this moment
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    first, second = (line for line in shown.splitlines() if "│ tiny" in line)
    assert "6 of 6" in first
    assert f"{losses(tmp_path / 'tiny' / 'first')[-1]:.4f}" in first
    assert first.split("│")[-2].strip() == "5"
    assert "2 of 2" in second
    assert main(["runs", str(tmp_path / "none")]) == 1
    assert "There are no runs in" in capsys.readouterr().err


def test_runs_that_are_damaged_are_listed_too(tmp_path, capsys, monkeypatch):
    good = train_loop(tiny(tmp_path, exp_name="good", save_interval=3)).parent
    for name in ("emptied", "changed", "[red]", "cut"):
        shutil.copytree(good, good.with_name(name))
    (tmp_path / "tiny" / "emptied" / "run.json").write_text("")
    with (tmp_path / "tiny" / "emptied" / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
        file.write(b'{"step": 6, "loss": "low"}\n')
    (tmp_path / "tiny" / "changed" / "run.json").write_text('{"num_train_steps": ["6"]}')
    (tmp_path / "tiny" / "cut" / "5" / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "."]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "│ tiny" in line]
    rows = {line.split("│")[1].strip().removeprefix("tiny/"): line for line in shown}
    newest = {name: line.split("│")[-2].strip() for name, line in rows.items()}
    assert rows.keys() == {"good", "emptied", "changed", "[red]", "cut"}
    assert "6 (run.json is damaged)" in rows["changed"]
    assert "6 of 6" in rows["good"]
    assert "6 (run.json is damaged)" in rows["emptied"]
    assert (newest["emptied"], newest["cut"]) == ("5", "3")
    train_loop(tiny(tmp_path, exp_name="emptied", resume=True, num_train_steps=7))
    assert len(losses(tmp_path / "tiny" / "emptied")) == 7


LONG_NAME = "a-name-that-is-longer-than-others"
# The width of a terminal and what is trained there.
TERMINALS = {
    200: ("--num-train-steps=20", "--log-interval=10"),
    120: (f"--exp-name={LONG_NAME}",),
    80: (f"--exp-name={LONG_NAME}",),
}
END = "--- end of a run ---"
IN_TURN = f"""
import json, os, sys
from piston.cli import main

for columns, words in json.loads(sys.argv[1]):
    os.environ["COLUMNS"] = columns
    assert main(words) == 0
    print("{END}", flush=True)
"""


@pytest.fixture(scope="module")
def terminals(tmp_path_factory):
    """The folder of each run, and what it wrote to its terminal. One process does all runs."""
    folders = {columns: tmp_path_factory.mktemp(f"columns{columns}") for columns in TERMINALS}
    runs = [(str(n), command(folders[n], *options)[3:]) for n, options in TERMINALS.items()]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TURN, json.dumps(runs)],
        env=environment(TERM="xterm"),
        stderr=theirs,
        stdout=theirs,
    )
    os.close(theirs)
    output = bytearray()
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait() == 0, output.decode()
    texts = output.decode().split(END)
    return {columns: (folders[columns], text) for columns, text in zip(TERMINALS, texts)}


def test_on_a_terminal_there_is_a_bar(terminals):
    """And log lines stand above it, each on a line of its own."""
    folder, text = terminals[200]
    for shown in ("━", "20/20", "loss ", "lr ", "samples/s", "data ", "Done. Serve it with"):
        assert shown in text
    lines = [line for line in text.splitlines() if "step 10/20  loss" in line]
    assert len(lines) == 1
    assert "━" not in lines[0]
    assert saved_steps(folder / "tiny" / "run")[-1] == 19


@pytest.mark.parametrize("columns", [80, 120])
def test_a_narrow_terminal_shows_all_numbers(terminals, columns):
    _, text = terminals[columns]
    line = next(part for part in reversed(text.splitlines()) if "6/6" in part)
    for shown in ("0:00:00", "loss 1.5", "lr 9.98e-03", " samples/s", "data ", "%"):
        assert shown in line
    assert ("a-name-" in line) == (columns > 80)


def test_sums_of_a_checkpoint_are_continued(tmp_path):
    meter = Meter(tiny(tmp_path), make_trainer())
    sums = {"skipped": 2, "skipped_in_a_row": 1, "count": 3, "gradient_norm": 1.5}
    meter.restore({**sums, "losses": {"velocity": [6.0, 3], "tokens": [1.0, 2]}})
    assert meter.metrics()["loss"] == 2.5
    assert meter.metrics()["loss/tokens"] == 0.5  # one of the three steps had no text
    # Version 0.1.0 had one sum without a name: the mean covers what follows.
    meter.restore({**sums, "loss": 9.0})
    found = meter.metrics()
    assert (found["loss"], found["gradient_norm"], found["skipped_steps"]) == (None, None, 2)


def test_time_without_steps_does_not_count(tmp_path):
    meter, batch = Meter(tiny(tmp_path, batch_size=10), make_trainer()), make_batch()
    output = StepOutput(torch.tensor(1.0), torch.tensor(1.0), torch.ones(4, dtype=torch.bool), 0.1)
    meter.start_clock()
    meter.add(0, output, batch, waited=0.0)
    with meter.paused():
        time.sleep(0.3)
    assert meter.metrics()["samples_per_second"] > 10 / 0.15


def test_elsewhere_there_are_only_lines(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, logger="piston")
    train_loop(tiny(tmp_path, log_interval=2))
    assert "━" not in capsys.readouterr().err
    assert [line["step"] for line in metrics(tmp_path / "tiny/run")] == [0, 2, 4, 5]
    assert sum("loss" in record.message for record in caplog.records) == 4

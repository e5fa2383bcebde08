"""Every command's output in a terminal of 80 columns: no line is longer, no name is cut."""

import json
import logging
import re
from pathlib import Path

import pytest

from piston import presets
from piston.cli import main
from piston.cli.console import console, table
from piston.logs import LineFormatter

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(REFERENCE)  # names of folders are short


def _words(capsys) -> str:
    """What was printed to stdout, once no line of it is too long."""
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    return shown


def test_presets(capsys):
    assert main(["presets"]) == 0
    shown = _words(capsys)
    assert all(f" {name} " in shown for name in presets.names())
    assert "A wider terminal also shows: data" in shown


def test_data_info_and_check(capsys):
    names = ("observation.images.wrist", "observation.state", "j13")
    assert main(["data", "info", "datasets/lerobot_v21"]) == 0
    shown = _words(capsys)
    assert all(name in shown for name in names)
    main(["data", "check", "datasets/lerobot_v21"])
    assert "observation.images.wrist" in _words(capsys)


def test_verify(capsys):
    assert main(["verify", "norm_stats/trossen"]) == 0
    assert "bytes written back" in _words(capsys)


def test_summary(capsys):
    assert main(["summary", "pi0_aloha_sim"]) == 0
    assert "2,508,531,712" in _words(capsys)


def test_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints" / "pi0_fast_libero_low_mem_finetune" / "my_first_long_name"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"num_train_steps": 20_000}))
    (folder / "metrics.jsonl").write_text('{"step": 11999, "loss": 0.0123}\n')
    assert main(["runs"]) == 0
    shown = _words(capsys)
    assert "pi0_fast_libero_low_mem_finetune/my_first_long_name" in shown
    assert "none yet" in shown


def test_a_table_leaves_out_columns_in_their_order(capsys, monkeypatch):
    columns, rows = ("name", "much", "more"), [("n" * 30, "m" * 30, "o" * 15)]
    console().print(table(columns, rows, drop=("much", "more")))
    shown = _words(capsys)
    assert ("n" * 30 in shown, "m" * 30 in shown, "o" * 15 in shown) == (True, False, True)
    monkeypatch.setenv("COLUMNS", "120")
    console().print(table(columns, rows, drop=("much", "more")))
    shown = capsys.readouterr().out
    assert "m" * 30 in shown
    assert "wider" not in shown


def test_log_lines():
    message = (
        "step 19900/20000  loss 0.0163  lr 2.50e-06  120.2 samples/s  data 50%  1:01:58 left in "
        "checkpoints/pi0_fast_libero_low_mem_finetune/a-name-with-hyphens"
    )
    record = logging.LogRecord("piston", logging.INFO, "loop.py", 1, message, (), None)
    lines = LineFormatter().format(record).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"\d\d:\d\d:\d\d \[I\] step 19900/20000  loss 0.0163  lr", lines[0])
    assert " ".join(" ".join(lines).split()[2:]) == " ".join(message.split())

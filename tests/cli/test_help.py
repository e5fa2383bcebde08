"""`--help` of every command, what a wrong command line is told, and the completion of words."""

import subprocess
import sys

import pytest

from piston import __version__
from piston.cli import VERBS, main

# Each takes a good part of a second to import.
HEAVY = ("torch", "pyarrow", "av", "mujoco", "h5py")
SCRIPT = f"""
import sys
from piston.cli import main
for verb in sys.argv[1:]:
    try:
        assert main([*verb.split(), "--help"]) == 0, verb
    except SystemExit as stop:
        assert stop.code == 0, verb
    found = [name for name in {HEAVY} if name in sys.modules]
    assert not found, f"`piston {{verb}} --help` imports {{found}}"
"""
SUB_COMMANDS = ("data check", "data info", "data convert", "client ping", "train debug")


def test_help_is_quick_and_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [*VERBS, *SUB_COMMANDS]
    result = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for verb in words:
        assert f"usage: piston {verb}" in result.stdout
    lines = result.stdout.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("usage:")] == []
    # Positional arguments have names of their own instead of types.
    usages = [line.partition(" [--")[0].split() for line in lines if line.startswith("usage:")]
    assert not [usage for usage in usages if {"STR", "PATH", "[STR]", "{None}|STR"} & set(usage)]


def test_the_list_of_verbs_and_the_version(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"piston {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "No verb is named 'trian'. Did you mean 'train'?"),
        ("data chek", "`piston data` has no sub-command 'chek'. Did you mean 'check'?"),
        ("client pong", "`piston client` has no sub-command 'pong'. Did you mean 'ping'?"),
        ("train --batch-size 3 debug", "The preset comes first: piston train PRESET --batch-size"),
        ("train debug --ema-decay 2", "error: --ema-decay must lie between 0 and 1, is 2.0."),
        ("stats pi0_libero --model.action-dim 0", "error: model.action_dim must be at least 1"),
        ("verify", "Name at least one case: piston verify CASE"),
    ],
)
def test_a_wrong_command_line_ends_with_one_sentence(words, message, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "tyro" not in shown


@pytest.mark.parametrize(
    ("words", "option"),
    [("train debug --batchsize 3", "--batch-size INT"), ("data check", "DATASET")],
)
def test_options_are_suggested_and_arguments_named(words, option, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert option in capsys.readouterr().err


def test_bash_completes_verbs_presets_and_options(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["completion", "bash"])
    script = tmp_path / "piston.bash"
    script.write_text(capsys.readouterr().out)
    tries = {
        "trai": "train",
        "data che": "check",
        "train pi0_fast_libero_l": "pi0_fast_libero_low_mem_finetune",
        "train debug --batch": "--batch-size",
        "stats pi0_ur5 --max-f": "--max-frames",
        "eval --execute": "--execute-horizon",
    }
    lines = [
        f"COMP_WORDS=(piston {words}); COMP_CWORD={len(words.split())}; COMPREPLY=(); "
        '_tyro_piston; echo "${COMPREPLY[@]}"'
        for words in tries
    ]
    program = "\n".join([f"source {script}", *lines])
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == list(tries.values())

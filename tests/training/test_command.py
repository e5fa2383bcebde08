"""`piston train` as a person types it."""

import dataclasses

import pytest

from piston import cli, presets
from piston.cli.train import parse
from piston.config import CosineDecaySchedule, RsqrtDecaySchedule
from piston.serialization import from_json, to_json
from piston.training.checkpoint import saved_steps

from .running import losses


def test_no_preset_replaces_an_earlier_run(tmp_path, capsys):
    assert [name for name in presets.names() if presets.get(name).overwrite] == []
    words = ["train", "debug", "--checkpoint-base-dir", str(tmp_path)]
    (tmp_path / "debug" / "debug" / "9").mkdir(parents=True)
    assert cli.main(words) == 1
    assert "exists already. Give --resume" in capsys.readouterr().err
    assert (tmp_path / "debug" / "debug" / "9").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--may-be-new", "*lora*"], "may-be-new of version 0.1.0 is named allow-missing now"),
        (["--data.more-sets=a/b"], "more-sets of version 0.1.0 is named extra-datasets now"),
    ],
)
def test_a_renamed_option_says_its_new_name(words, message):
    with pytest.raises(ValueError, match=message):
        parse(["pi0_libero", "--exp-name", "x", *words])


def test_resume_beside_overwrite_is_a_contradiction(capsys):
    assert cli.main(["train", "debug", "--resume", "--overwrite"]) == 2
    assert capsys.readouterr().err.startswith("error: --resume continues a run and --overwrite")


@pytest.fixture
def rsqrt(monkeypatch):
    """The name of a preset with another schedule."""
    schedule = RsqrtDecaySchedule(warmup_steps=2, peak_lr=1e-2, timescale=500.0)
    preset = dataclasses.replace(presets.get("tiny"), name="tiny_rsqrt", lr_schedule=schedule)
    monkeypatch.setattr(presets, "_BY_NAME", {**presets._BY_NAME, preset.name: preset})
    return preset.name


def test_the_options_of_the_schedule_are_those_of_the_presets(rsqrt):
    words = ["--lr-schedule.peak-lr", "1e-4", "--lr-schedule.decay-steps", "2000"]
    cosine = CosineDecaySchedule(peak_lr=1e-4, decay_steps=2000)
    assert parse(["debug", *words]).lr_schedule == cosine
    config = parse([rsqrt, "--lr-schedule.timescale", "700"])
    assert config.lr_schedule == RsqrtDecaySchedule(2, 1e-2, 700.0)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("verb", ["train", "stats"])
def test_an_option_of_another_schedule_is_refused(verb, rsqrt, capsys):
    for preset, words in (
        (rsqrt, ["--lr-schedule.decay-steps", "9"]),
        ("debug", ["--lr-schedule.timescale", "5"]),
        ("debug", ["--lr-schedule", "rsqrt"]),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, preset, *words])
        assert stop.value.code == 2
        assert f"Unrecognized options: {words[0]}" in capsys.readouterr().err


def test_the_help_lists_presets_and_options(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in presets.names())
    with pytest.raises(SystemExit):
        parse(["debug", "--help"])
    shown = capsys.readouterr().out
    for option in ("--lr-schedule.peak-lr", "--lr-schedule.decay-steps", "--batch-size"):
        assert option in shown


def test_a_run_with_another_schedule_in_a_folder_to_be_quoted(tmp_path, rsqrt, capsys):
    folder = tmp_path / "my runs"
    words = ["train", rsqrt, "--checkpoint-base-dir", str(folder)]
    assert cli.main(words) == 0
    assert f"piston serve '{folder}/{rsqrt}/run/5'" in capsys.readouterr().err
    assert cli.main([*words, "--resume", "--num-train-steps", "8"]) == 0
    assert saved_steps(folder / rsqrt / "run")[-1] == 7
    assert len(losses(folder / rsqrt / "run")) == 8

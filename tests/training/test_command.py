"""`piston train` as a person types it."""

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


@pytest.mark.parametrize("words", [["--lr-schedule", "rsqrt"], ["--lr-schedule=rsqrt"]])
def test_another_schedule_has_options_of_its_own(words):
    config = parse(["pi0_libero", "--exp-name", "x", *words, "--lr-schedule.timescale", "500"])
    before = presets.get("pi0_libero").lr_schedule
    assert config.lr_schedule == RsqrtDecaySchedule(before.warmup_steps, before.peak_lr, 500.0)
    assert from_json(to_json(config)) == config


def test_the_presets_schedule_keeps_its_options():
    words = ["--lr-schedule.peak-lr", "1e-4", "--lr-schedule.decay-steps", "2000"]
    for chosen in ([], ["--lr-schedule", "cosine"]):
        schedule = parse(["debug", *words, *chosen]).lr_schedule
        assert schedule == CosineDecaySchedule(peak_lr=1e-4, decay_steps=2000)


def test_an_unknown_schedule_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        parse(["debug", "--lr-schedule", "linear"])
    assert "'cosine', 'rsqrt'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "stats"])
def test_an_option_of_another_schedule_is_refused(verb, capsys):
    for kind, words in (
        ("rsqrt", ["--lr-schedule", "rsqrt", "--lr-schedule.decay-steps", "9"]),
        ("cosine", ["--lr-schedule.timescale", "5"]),
    ):
        assert cli.main([verb, "debug", *words]) == 2
        message = f"error: {words[-2]} is no option of the {kind} schedule.\n"
        assert capsys.readouterr().err == message


def test_the_help_lists_presets_schedules_and_options(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in presets.names())
    with pytest.raises(SystemExit):
        parse(["debug", "--help"])
    shown = capsys.readouterr().out
    for option in ("--lr-schedule {cosine,rsqrt}", "--lr-schedule.timescale", "--batch-size"):
        assert option in shown


def test_a_run_with_another_schedule_in_a_folder_to_be_quoted(tmp_path, capsys):
    folder = tmp_path / "my runs"
    words = ["train", "tiny", "--lr-schedule", "rsqrt", "--checkpoint-base-dir", str(folder)]
    assert cli.main(words) == 0
    assert f"piston serve '{folder}/tiny/run/5'" in capsys.readouterr().err
    assert cli.main([*words, "--resume", "--num-train-steps", "8"]) == 0
    assert saved_steps(folder / "tiny" / "run")[-1] == 7
    assert len(losses(folder / "tiny" / "run")) == 8

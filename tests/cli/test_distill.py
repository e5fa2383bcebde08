"""`piston distill`: a checkpoint learns to denoise in one step; what it knew stays."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from piston import presets, weights
from piston.cli import main
from piston.cli.train import parse_distilled
from piston.files import read_json_lines
from piston.training.distill import distilled
from piston.training.optimizer import freeze_parameters

NEW = "suffix.time.target.weight"


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Presets with fewer weights."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("debug", "debug_fast"):
            preset = presets.get(name)
            model = dataclasses.replace(preset.model, vocab_size=600, tokenizer="bytes")
            patched.setitem(presets._BY_NAME, name, dataclasses.replace(preset, model=model))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train("debug", "first", folder)
    return folder / "debug" / "first" / "9"


def train(preset, name, folder, *options):
    arguments = ["--exp-name", name, "--checkpoint-base-dir", str(folder), *options]
    assert main(["train", preset, *arguments]) == 0


def tensors(checkpoint):
    return load_file(next(checkpoint.glob("model*.safetensors")))


def test_one_step_is_learned_and_the_vlm_stays(trained, tmp_path):
    options = ["--exp-name", "quick", "--checkpoint-base-dir", str(tmp_path)]
    assert main(["distill", str(trained), *options, "--num-train-steps", "4"]) == 0
    found = tmp_path / "debug" / "quick" / "3"
    before, after = tensors(trained), tensors(found)
    assert after.keys() - before.keys() == {NEW}
    assert after[NEW].abs().max() > 0
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not {name for name in changed if name.startswith(("vision.", "vlm."))}
    config = json.loads((found / "config.json").read_text())
    assert config["model"]["distilled_steps"] == 1
    logged = [line for _, line in read_json_lines(found.parent / "metrics.jsonl")]
    assert {"loss/velocity", "loss/shortcut"} <= logged[-1].keys()
    # The folder is all that is needed, and says how many steps it wants.
    model = weights.load_model(found)
    assert model.config.num_steps == 1


def test_a_stopped_run_continues_as_if_it_had_not(trained, tmp_path):
    base = ["distill", str(trained), "--checkpoint-base-dir", str(tmp_path)]
    base += ["--save-interval", "2", "--lr-schedule.decay-steps", "2000"]
    assert main([*base, "--exp-name", "whole", "--num-train-steps", "5"]) == 0
    assert main([*base, "--exp-name", "cut", "--num-train-steps", "3"]) == 0
    assert main([*base, "--exp-name", "cut", "--num-train-steps", "5", "--resume"]) == 0
    whole, cut = (tensors(tmp_path / "debug" / name / "4") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_what_is_changed_and_what_can_be(trained):
    config = parse_distilled([str(trained), "--exp-name", "x", "--model.distilled-steps", "2"])
    assert config.model.distilled_steps == config.model.num_steps == 2
    assert config.weights == str(trained)
    assert config.noise_draws == 2
    assert config.freeze == ("vision.*", "vlm.*")
    # Half of the steps and of the learning rate of its training.
    assert config.num_train_steps == 5
    before, after = presets.get("debug").lr_schedule, config.lr_schedule
    for name in ("peak_lr", "decay_lr", "warmup_steps", "decay_steps"):
        assert getattr(after, name) == getattr(before, name) / 2
    with pytest.raises(ValueError, match="nothing to learn"):
        parse_distilled([str(trained), "--exp-name", "x", "--model.distilled-steps", "None"])


def test_adapters_stay_adapters(tmp_path):
    config = presets.get("pi0_libero_low_mem_finetune")
    found = distilled(config, tmp_path)
    model = weights.build_on_meta(found.model)
    freeze_parameters(model, found.freeze)
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert [name for name in trained if "action_expert" in name]
    assert all("lora" in name or name.startswith("suffix.") for name in trained)


def test_what_cannot_be_distilled_is_refused(trained, tmp_path, capsys):
    options = ["--exp-name", "quick", "--checkpoint-base-dir", str(tmp_path)]
    assert main(["distill", str(trained), *options, "--noise-draws", "1"]) == 2
    assert "expected at least 2" in capsys.readouterr().err
    train("debug_fast", "fast", tmp_path, "--num-train-steps", "1")
    assert main(["distill", str(tmp_path / "debug_fast" / "fast" / "0"), *options]) == 1
    assert "does not denoise" in capsys.readouterr().err
    assert main(["distill", str(trained), *options, "--num-train-steps", "1"]) == 0
    again = str(tmp_path / "debug" / "quick" / "0")
    assert main(["distill", again, "--exp-name", "again"]) == 1
    assert "was distilled already, to 1 steps" in capsys.readouterr().err
    assert main(["distill", "--exp-name", "x"]) == 2
    assert "The checkpoint comes first" in capsys.readouterr().err
    assert main(["distill", str(tmp_path / "nothing"), *options]) == 1
    model = weights.load_model(trained)
    weights.save_model(model, model.config, tmp_path / "foreign")
    capsys.readouterr()
    assert main(["distill", str(tmp_path / "foreign"), *options]) == 1
    assert "Fine-tune it with `piston train" in capsys.readouterr().err


def test_a_distilled_model_is_not_written_as_what_others_could_not_read(trained, tmp_path, capsys):
    options = ["--exp-name", "quick", "--checkpoint-base-dir", str(tmp_path)]
    assert main(["distill", str(trained), *options, "--num-train-steps", "1"]) == 0
    made = str(tmp_path / "debug" / "quick" / "0")
    for kind in ("openpi", "openpi-jax", "lerobot"):
        assert main(["convert", made, str(tmp_path / kind), "--to", kind]) == 1
        assert "distilled" in capsys.readouterr().err

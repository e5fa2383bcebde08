"""The commands of docs/training.md: all of them are understood, and what can run here runs."""

import contextlib
import dataclasses
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import piston
from piston import cli, presets, weights
from piston.cli import train
from piston.models.configs import VISION, Pi0Config
from piston.models.lora import matching_parameters
from piston.robots.aloha import make_aloha_example
from piston.training.checkpoint import saved_steps
from piston.training.loop import train_loop

from .running import tiny
from .tiny_presets import SLOW_TO_SAVE

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCK.findall(PAGE) for line in block.splitlines()]
# What makes training short enough to run here.
SHORT = [
    *("--weights", "None", "--num-train-steps", "3", "--batch-size", "2", "--num-workers", "0"),
    *("--model.vlm", "dummy", "--model.action-expert", "dummy"),
]


def _verb(words):
    """What `piston` gets, directly or from torchrun."""
    return words[words.index("piston.cli") + 1 :] if words[0] == "torchrun" else words[1:]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_commands_are_understood(words):
    verb, *rest = _verb(words)
    assert verb in cli.VERBS
    if verb in ("train", "stats"):
        name = [] if "--exp-name" in rest else ["--exp-name", "x"]
        config = train.parse([*rest, *name])
        assert config.name == rest[0]
        if "debug" not in rest:
            assert config.data.repo_id.endswith("fold_towel")
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1 : words.index("piston.cli") + 1])
        assert options.module


def _write_episodes(folder):
    h5py = pytest.importorskip("h5py", reason="needs piston[hdf5]")
    folder.mkdir()
    random = np.random.default_rng(0)
    for episode in range(3):
        with h5py.File(folder / f"episode_{episode}.hdf5", "w") as file:
            for name in ("action", "observations/qpos"):
                file[name] = random.uniform(0, 1, size=(12, 14))
            for camera in ("cam_high", "cam_left_wrist", "cam_right_wrist"):
                image = random.integers(256, size=(12, 48, 64, 3), dtype=np.uint8)
                file[f"observations/images/{camera}"] = image


def _run(words):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(words) == 0, words
    return output.getvalue()


def test_from_conversion_to_a_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    _write_episodes(tmp_path / "recordings")
    preset = presets.get("pi0_aloha_pen_uncap")
    model = dataclasses.replace(
        preset.model, vision=VISION["dummy"], tokenizer="bytes", vocab_size=300, image_size=28
    )
    small = dataclasses.replace(preset, model=model)
    monkeypatch.setitem(presets._BY_NAME, preset.name, small)
    done = []
    for words in COMMANDS:
        verb, *rest = _verb(words)
        if words[0] == "torchrun" or verb not in ("data", "stats", "train", "serve"):
            continue
        if verb == "serve":
            break
        _run([verb, *rest, *(SHORT if verb == "train" else ())])
        done.append(verb)
    assert done == ["data", "data", "stats", "train"]
    run = tmp_path / "checkpoints" / "pi0_aloha_pen_uncap" / "towel"
    assert saved_steps(run) == [2]
    assert "validation/action_error" in (run / "metrics.jsonl").read_text()
    actions = piston.load_policy(run / "2").infer(make_aloha_example())["actions"]
    assert actions.shape == (50, 14)


@pytest.mark.slow
def test_try_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = [_verb(words) for words in COMMANDS if "debug" in words or words[1:] == ["runs"]]
    assert len(tried) == 3
    shown = [_run(words) for words in tried]
    assert "12 of 12" in shown[-1]
    assert saved_steps(tmp_path / "checkpoints" / "debug" / "try") == [11]


def _gigabytes(model, trained, ema=True):
    """Float32 masters of everything; gradient, two moments and the mean of what trains."""
    counts = {name: p.numel() for name, p in weights.build_on_meta(model).named_parameters()}
    moving = sum(count for name, count in counts.items() if trained(name))
    return (4 * sum(counts.values()) + (16 if ema else 12) * moving) / 1e9


def test_the_memory_table_is_true():
    rows = {}
    for line in PAGE[PAGE.index("## Memory") :].splitlines():
        if line.startswith("|") and "GB" in line:
            what, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[what] = [float(cell.removesuffix(" GB")) for cell in cells if cell]
    everything, no_mean, expert, adapters, sharded = rows.values()
    models = Pi0Config(), Pi0Config(pi05=True)
    low_memory = presets.get("pi0_libero_low_mem_finetune")
    for index, model in enumerate(models):
        whole = _gigabytes(model, lambda _: True)
        assert everything[index] == pytest.approx(whole, abs=0.05)
        assert sharded[index] == pytest.approx(whole / 8, abs=0.05)
        assert no_mean[index] == pytest.approx(
            _gigabytes(model, lambda _: True, ema=False), abs=0.05
        )
        moving = _gigabytes(model, lambda name: not name.startswith(("vision.", "vlm.")))
        assert expert[index] == pytest.approx(moving, abs=0.05)
    frozen = set(matching_parameters(_names(low_memory.model), low_memory.freeze))
    found = _gigabytes(low_memory.model, lambda n: n not in frozen, bool(low_memory.ema_decay))
    assert adapters == [pytest.approx(found, abs=0.05)]


def test_the_size_of_a_checkpoint_is_true(tmp_path):
    """By a small model, of which a part is frozen; and the page's number by that."""
    for ema, per_trained in ((0.99, 20), (None, 16)):
        config = tiny(tmp_path, exp_name=f"ema-{ema}", ema_decay=ema, freeze=("vision.*",))
        config = dataclasses.replace(config, model=SLOW_TO_SAVE, num_train_steps=1)
        last = train_loop(config)
        counts = {n: p.numel() for n, p in weights.build_on_meta(config.model).named_parameters()}
        frozen = sum(count for name, count in counts.items() if name.startswith("vision."))
        expected = 8 * frozen + per_trained * (sum(counts.values()) - frozen)
        found = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        assert found == pytest.approx(expected, rel=0.05)
    whole = sum(p.numel() for p in weights.build_on_meta(Pi0Config()).parameters())
    assert f"{20 * whole / 1e9:.1f} GB for all of π0 with EMA" in PAGE.replace("\n", " ")


def _names(model):
    return [name for name, _ in weights.build_on_meta(model).named_parameters()]

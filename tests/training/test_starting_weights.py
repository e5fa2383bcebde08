"""What a run starts from: ours, foreign ones, and with parts that are new."""

import dataclasses

import pytest
import torch

from piston import weights
from piston.models.configs import LoRA
from piston.training.loop import train_loop

from .running import assert_same_tensors, state, tiny
from .tiny_presets import GEMMA, PI0


def test_starts_from_our_own_checkpoint(tmp_path):
    base = train_loop(tiny(tmp_path, exp_name="base"))
    still = dataclasses.replace(tiny(tmp_path).lr_schedule, peak_lr=1e-30, decay_lr=0.0)
    last = train_loop(
        tiny(tmp_path, weights=str(base), num_train_steps=1, lr_schedule=still, ema_decay=None)
    )
    ours, theirs = weights.load_model(last), weights.load_model(base)
    assert_same_tensors(ours.state_dict(), theirs.state_dict(), 1e-12)


@pytest.mark.parametrize("source", ["model.safetensors", "params"])
def test_starts_from_foreign_formats(tmp_path, reference, source):
    case = reference / "models" / "pi0"
    model = dataclasses.replace(weights.open_checkpoint(case / "params").config, dtype="float32")
    still = dataclasses.replace(tiny(tmp_path).lr_schedule, peak_lr=1e-30, decay_lr=0.0)
    last = train_loop(
        tiny(
            tmp_path,
            model=model,
            weights=str(case / source),
            num_train_steps=1,
            batch_size=1,
            lr_schedule=still,
        )
    )
    ours, theirs = weights.load_model(last), weights.load_model(case / source, model)
    assert_same_tensors(ours.state_dict(), theirs.state_dict(), 1e-12)


def test_starting_weights_that_do_not_fit_are_named(tmp_path):
    base = train_loop(tiny(tmp_path, exp_name="base"))
    wider = dataclasses.replace(PI0, action_dim=9)
    with pytest.raises(ValueError, match=r"suffix\.action_in\.weight"):
        train_loop(tiny(tmp_path, model=wider, weights=str(base)))
    assert not (tmp_path / "tiny" / "run").exists()


LORA = dataclasses.replace(PI0, vlm=dataclasses.replace(GEMMA, lora=LoRA(rank=2, alpha=2.0)))


def test_new_parameters_have_to_be_listed(tmp_path):
    base = train_loop(tiny(tmp_path, exp_name="base"))
    changes = {"model": LORA, "weights": str(base), "freeze": ("vision.*", "vlm.*", "!*lora*")}
    with pytest.raises(ValueError, match="lora_a"):
        train_loop(tiny(tmp_path, **changes))
    last = train_loop(tiny(tmp_path, **changes, allow_missing=("*lora*",)))
    before, after = weights.load_model(base).state_dict(), weights.load_model(last).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(("vision.", "vlm.")) for name in moved)
    saved = state(last)
    assert any("lora" in name for name in saved)
    assert not any(n.startswith("ema/vision") or "exp_avg/vision" in n for n in saved)

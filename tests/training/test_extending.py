"""Optimizers and losses of one's own: `docs/extending.md` shows how they are written."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from piston.config import OptimizerConfig
from piston.models.build import build_model
from piston.serialization import from_json, to_json
from piston.training.checkpoint import CheckpointWriter, restore, state_tensors
from piston.training.step import Trainer

from .running import assert_same_tensors, state, tiny
from .test_step import ALONE, make_batch, make_trainer, train
from .tiny_presets import PI0

EXAMPLES = Path(__file__).parents[2] / "examples" / "extending"
SGD = runpy.run_path(str(EXAMPLES / "optimizer.py"))["SGD"]
LOSS = runpy.run_path(str(EXAMPLES / "loss.py"))


@dataclasses.dataclass(frozen=True)
class PlainSGD(OptimizerConfig):
    """Without fused kernels, which skip a step on the device."""

    def build(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], 0.0, foreach=False)


def test_another_optimizer_trains_and_resumes(tmp_path):
    trainer, config = make_trainer(optimizer=SGD()), tiny(tmp_path, optimizer=SGD())
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    for step in range(2):
        trainer.step(make_batch(), step)
    with CheckpointWriter(config, tmp_path, ALONE, []) as writer:
        writer.save(trainer, 1, {})
        writer.finish()
    kept = {name.rsplit("/", 1)[1] for name in state(tmp_path / "1") if "optimizer/" in name}
    assert kept == {"momentum_buffer"}
    resumed = make_trainer(optimizer=SGD(), seed=1)
    restore(resumed, tmp_path / "1")
    for number in (2, 3):
        trainer.step(make_batch(), number)
        resumed.config = trainer.config  # the seed of the noise
        resumed.step(make_batch(), number)
    assert_same_tensors(state_tensors(resumed), state_tensors(trainer))
    assert any(not torch.equal(p, before[name]) for name, p in trainer.parameters.items())


def test_another_optimizer_is_part_of_the_configuration():
    config = make_trainer(optimizer=SGD(momentum=0.5, clip_gradient_norm=2.0)).config
    assert from_json(to_json(config)) == config
    with pytest.raises(ValueError, match="clip_gradient_norm must be > 0, is 0"):
        SGD(clip_gradient_norm=0)


@pytest.mark.parametrize("optimizer", [SGD(), PlainSGD()], ids=["fused", "plain"])
def test_another_optimizer_skips_steps_that_are_not_finite(optimizer):
    trainer = make_trainer(optimizer=optimizer)
    trainer.step(make_batch(), 0)
    before = {name: value.clone() for name, value in state_tensors(trainer).items()}
    batch = make_batch()
    batch["actions"][0, 0, 0] = torch.inf
    assert train(trainer, batch, 1).skipped
    assert_same_tensors(state_tensors(trainer), before)


def make_extended(**changes):
    trainer = make_trainer(augmentation=False, ema_decay=None, **changes)
    config = dataclasses.replace(
        trainer.config, model=LOSS["FirstActionConfig"](**vars(trainer.config.model))
    )
    model = build_model(config.model)
    model.load_state_dict(trainer.model.state_dict())
    return trainer, Trainer(config, model, ALONE)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dims", [3, PI0.action_dim])
def test_another_loss_is_the_weighted_mean_of_its_values(parts, dims):
    plain, extended = make_extended(gradient_accumulation=parts, mask_padded_dims=True)
    batch = make_batch()
    batch["action_dims"][:] = dims
    draws = extended._draw(len(batch["state"]), 0)
    values = extended._named_losses(batch, slice(None), draws)["first_action"].detach()
    before, after = train(plain, batch, 0), train(extended, batch, 0)
    assert after.losses["velocity"] == pytest.approx(before.losses["velocity"], rel=1e-6)
    counted = extended.loss_weights(batch)["first_action"].bool()
    assert counted.shape == values.shape == (4, PI0.action_dim)
    assert counted.all() == (dims == PI0.action_dim)
    expected = values[counted].mean()
    assert_close(torch.tensor(after.losses["first_action"]), expected, atol=1e-6, rtol=1e-5)
    assert after.loss == pytest.approx(sum(after.losses.values()))
    assert after.gradient_norm != before.gradient_norm


def test_a_loss_without_weight_changes_nothing(monkeypatch):
    plain, extended = make_extended()
    zeros = {"first_action": torch.zeros(4, PI0.action_dim)}
    weights = {**plain.loss_weights(make_batch()), **zeros}
    monkeypatch.setattr(extended.model, "loss_weights", lambda *_: weights)
    before, after = train(plain, make_batch(), 0), train(extended, make_batch(), 0)
    assert after.losses == before.losses
    assert after.gradient_norm == before.gradient_norm

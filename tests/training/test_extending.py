"""Optimizers and losses of one's own: `docs/extending.md` shows how they are written."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from piston.config import OptimizerConfig
from piston.models.flow import Pi0
from piston.serialization import from_json, to_json
from piston.training.checkpoint import CheckpointWriter, restore, state_tensors
from piston.training.step import Trainer

from .running import assert_same_tensors, state, tiny
from .test_step import ALONE, make_batch, make_trainer, train
from .tiny_presets import PI0

REPOSITORY = Path(__file__).parents[2]
SGD = runpy.run_path(str(REPOSITORY / "examples" / "extending" / "optimizer.py"))["SGD"]


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


class FirstAction(Pi0):
    """Counts the first action of a chunk a second time, half as much for every second sample."""

    @property
    def loss_names(self):
        return (*super().loss_names, "first_action")

    def training_losses(self, observation, actions, draws):
        losses = super().training_losses(observation, actions, draws)
        return {**losses, "first_action": losses["velocity"][:, 0].mean(-1)}

    def loss_weights(self, batch, action_weights):
        weights = super().loss_weights(batch, action_weights)
        return {**weights, "first_action": 1 - 0.5 * (torch.arange(len(action_weights)) % 2)}


def make_extended(**changes):
    trainer = make_trainer(augmentation=False, ema_decay=None, **changes)
    model = FirstAction(PI0)
    model.load_state_dict(trainer.model.state_dict())
    return trainer, Trainer(trainer.config, model, ALONE)


@pytest.mark.parametrize("parts", [1, 2])
def test_another_loss_is_the_weighted_mean_of_its_values(parts):
    plain, extended = make_extended(gradient_accumulation=parts)
    batch = make_batch()
    draws = extended._draw(len(batch["state"]), 0)
    values = extended._named_losses(batch, slice(None), draws)["first_action"].detach()
    before, after = train(plain, batch, 0), train(extended, batch, 0)
    assert after.losses["velocity"] == pytest.approx(before.losses["velocity"], rel=1e-6)
    expected = (values[0] + 0.5 * values[1] + values[2] + 0.5 * values[3]) / 3
    assert_close(torch.tensor(after.losses["first_action"]), expected, atol=1e-6, rtol=1e-5)
    assert after.loss == pytest.approx(sum(after.losses.values()))
    assert after.gradient_norm != before.gradient_norm


def test_a_loss_without_weight_changes_nothing(monkeypatch):
    plain, extended = make_extended()
    zeros = {"first_action": torch.zeros(4)}
    weights = {**plain.loss_weights(make_batch()), **zeros}
    monkeypatch.setattr(extended.model, "loss_weights", lambda *_: weights)
    before, after = train(plain, make_batch(), 0), train(extended, make_batch(), 0)
    assert after.losses == before.losses
    assert after.gradient_norm == before.gradient_norm

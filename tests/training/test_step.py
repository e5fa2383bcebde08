"""A step: what moves, by how much, and what must not matter."""

import copy
import dataclasses
import sys

import pytest
import torch
from torch.testing import assert_close

from piston import weights
from piston.config import CosineDecaySchedule
from piston.data.samples import FakeDataset
from piston.models.configs import GemmaSize, LoRA, VisionSize
from piston.observation import Observation, stack_samples
from piston.training.distributed import Processes
from piston.training.step import Trainer

from .tiny_presets import FAST, GEMMA, KI, PI0, PI05, TINY

ALONE = Processes(0, 1, torch.device("cpu"))


def make_trainer(**changes):
    config = dataclasses.replace(TINY, **changes)
    torch.manual_seed(0)
    return Trainer(config, weights.build_model(config.model), ALONE)


def make_batch(model=PI0, size=4, start=0):
    data = FakeDataset(model)
    return stack_samples([data[start + i] for i in range(size)])


def train(trainer, batch, number):
    """One step, and what it measured."""
    return trainer.read([trainer.step(batch, number)])[0]


def gradients(trainer):
    return {n: p.grad for n, p in trainer.parameters.items() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])
def test_one_batch_is_learned_by_heart(pi05):
    steps = 300
    expert = GemmaSize(width=64, depth=1, mlp_dim=256, num_heads=2, num_kv_heads=1, head_dim=16)
    model = dataclasses.replace(
        PI0,
        pi05=pi05,
        action_dim=2,
        action_horizon=3,
        max_token_len=4,
        image_size=16,
        cameras=("base_0_rgb",),
        vision=VisionSize(width=16, depth=1, mlp_dim=32, num_heads=2, patch=16),
        vlm=dataclasses.replace(expert, width=16, mlp_dim=32),
        action_expert=expert,
    )
    schedule = CosineDecaySchedule(20, peak_lr=1e-2, decay_steps=steps, decay_lr=1e-4)
    trainer = make_trainer(
        model=model, noise_draws=64, lr_schedule=schedule, ema_decay=0.97, augmentation=False
    )
    batch = make_batch(model, size=2)
    for step in range(steps):
        trainer.step(batch, step)
    with trainer.ema.applied():
        for seed in range(4):
            noise = torch.Generator().manual_seed(seed)
            sampled = trainer.model.act(Observation.from_dict(batch), generator=noise)
            assert_close(sampled, batch["actions"], atol=0.02, rtol=0)


def test_a_step_depends_on_seed_and_number_alone():
    batch = make_batch()
    one, other = make_trainer(), make_trainer()
    torch.manual_seed(1)
    first = train(one, batch, 3)
    torch.manual_seed(2)
    assert train(other, batch, 3) == first
    assert train(make_trainer(), batch, 4).loss != first.loss
    assert train(make_trainer(seed=7), batch, 3).loss != first.loss


@pytest.mark.parametrize("model", [PI0, PI05, FAST, KI], ids=["pi0", "pi05", "fast", "ki"])
def test_parts_add_up_to_the_whole_batch(model):
    whole, parts = make_trainer(model=model), make_trainer(model=model, gradient_accumulation=4)
    batch = make_batch(model)
    one, other = train(whole, batch, 0), train(parts, batch, 0)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_parts_with_unequal_masks_add_up_to_the_whole_batch():
    batch = make_batch()
    batch["action_is_pad"][0, 1:] = True
    batch["action_is_pad"][3, 3:] = True
    changes = {"mask_padded_steps": True}
    whole = train(make_trainer(**changes), batch, 0)
    parts = train(make_trainer(**changes, gradient_accumulation=4), batch, 0)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-5)
    assert whole.gradient_norm == pytest.approx(parts.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("model", [PI0, PI05, FAST, KI], ids=["pi0", "pi05", "fast", "ki"])
def test_gradient_checkpointing_changes_nothing(model):
    plain, saving = (make_trainer(model=model, gradient_checkpointing=x) for x in (False, True))
    batch = make_batch(model)
    assert train(plain, batch, 0).loss == pytest.approx(train(saving, batch, 0).loss, rel=1e-6)
    expected = gradients(plain)
    for name, gradient in gradients(saving).items():
        assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)


def test_draws_share_a_prefix_and_average():
    """Three draws are the mean of three steps with one draw each."""
    trainer = make_trainer(noise_draws=3, augmentation=False)
    batch = make_batch()
    draws = trainer._draw(4, 0)
    observation = Observation.from_dict(batch)
    expected = [
        trainer.model.training_losses(
            observation, batch["actions"], {name: one[:, i : i + 1] for name, one in draws.items()}
        )["velocity"]
        for i in range(3)
    ]
    assert train(trainer, batch, 0).loss == pytest.approx(
        torch.stack(expected).mean().item(), rel=1e-5
    )


def _with_other_targets(draws, batch, where):
    """The same noisy actions, but other velocities to be learned, in the places given."""
    t = draws["time"][..., None, None]
    shift = torch.randn(draws["noise"].shape, generator=torch.Generator().manual_seed(5)) * where
    # x_t = t · noise + (1 − t) · actions stays; noise − actions does not. One draw only.
    changed = {**batch, "actions": batch["actions"] + shift[:, 0]}
    return {**draws, "noise": draws["noise"] - shift * (1 - t) / t}, changed


@pytest.mark.parametrize("kind", ["steps", "dims"])
def test_what_is_masked_has_no_part_in_loss_or_gradients(kind, monkeypatch):
    batch = make_batch()
    batch["action_is_pad"][1, 2:] = True
    batch["action_is_pad"][2, 4:] = True
    batch["action_dims"][:] = 6
    masked = torch.zeros_like(batch["actions"])
    if kind == "steps":
        masked[batch["action_is_pad"]] = 1
    else:
        masked[..., 6:] = 1
    results = []
    for change in (False, True):
        option = {f"mask_padded_{kind}": True}
        trainer = make_trainer(**option, augmentation=False, noise_draws=1)
        draws, given = trainer._draw(4, 0), batch
        if change:
            draws, given = _with_other_targets(draws, batch, masked[:, None])
        monkeypatch.setattr(trainer, "_draw", lambda *_, draws=draws: draws)
        results.append((train(trainer, given, 0), gradients(trainer)))
    (one, expected), (other, found) = results
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for name, gradient in found.items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)
    if kind == "dims":
        assert not found["suffix.action_out.weight"][6:].any()
        assert found["suffix.action_out.weight"][:6].any()


def test_masked_loss_is_the_mean_over_what_is_left():
    batch = make_batch()
    batch["action_is_pad"][1, 2:] = True
    batch["action_dims"][:] = 6
    trainer = make_trainer(mask_padded_steps=True, mask_padded_dims=True, augmentation=False)
    draws = trainer._draw(4, 0)
    with torch.no_grad():
        losses = trainer.model.training_losses(
            Observation.from_dict(batch), batch["actions"], draws
        )
        errors = losses["velocity"]
    kept = errors[~batch["action_is_pad"]][:, :6]
    assert train(trainer, batch, 0).loss == pytest.approx(kept.mean().item(), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_each_loss_is_the_mean_over_what_has_it(parts):
    """Of samples with actions, with tokens to learn, with both and with neither."""
    batch = make_batch(KI)
    batch["token_loss_mask"][[1, 3]] = False
    batch["action_dims"][:] = torch.tensor([8, 6, 0, 0])
    trainer = make_trainer(
        model=KI, mask_padded_dims=True, augmentation=False, gradient_accumulation=parts
    )
    draws = trainer._draw(4, 0)
    with torch.no_grad():
        losses = trainer.model.training_losses(
            Observation.from_dict(batch), batch["actions"], draws
        )
    numbers = torch.cat((losses["velocity"][0].flatten(), losses["velocity"][1, :, :6].flatten()))
    result = train(trainer, batch, 0)
    assert result.losses["velocity"] == pytest.approx(numbers.mean().item(), rel=1e-5)
    assert losses["tokens"][[1, 3]].tolist() == [0, 0]
    assert result.losses["tokens"] == pytest.approx(
        losses["tokens"][[0, 2]].mean().item(), rel=1e-5
    )
    assert result.loss == pytest.approx(sum(result.losses.values()))


def test_a_batch_without_actions_or_tokens_moves_nothing_by_that_loss():
    batch = make_batch(KI)
    batch["action_dims"][:] = 0
    assert list(train(make_trainer(model=KI), batch, 0).losses) == ["tokens"]
    batch = make_batch(KI)
    batch["token_loss_mask"][:] = False
    assert list(train(make_trainer(model=KI), batch, 0).losses) == ["velocity"]


def test_a_loss_that_is_not_finite_moves_nothing():
    trainer = make_trainer()
    trainer.step(make_batch(), 0)
    before = copy.deepcopy((trainer.model.state_dict(), trainer.ema.mean))
    steps = [int(s["step"]) for s in trainer.optimizer.state.values()]
    batch = make_batch()
    batch["actions"][2, 1, 3] = torch.inf
    result = train(trainer, batch, 1)
    assert result.skipped
    assert result.bad_samples == (2,)
    for ours, theirs in zip(before, (trainer.model.state_dict(), trainer.ema.mean)):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert [int(s["step"]) for s in trainer.optimizer.state.values()] == steps
    assert not train(trainer, make_batch(), 2).skipped


def test_only_adapters_move():
    lora = dataclasses.replace(GEMMA, lora=LoRA(rank=2, alpha=2.0))
    model = dataclasses.replace(PI0, vlm=lora)
    freeze = ("vision.*", "vlm.*", "action_expert.*", "suffix.*", "!*lora*")
    trainer = make_trainer(model=model, freeze=freeze)
    before = copy.deepcopy(trainer.model.state_dict())
    for step in range(3):
        trainer.step(make_batch(model), step)
    moved = {n for n, v in trainer.model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved
    assert all("lora" in name for name in moved)
    assert set(trainer.ema.mean) == set(trainer.parameters)
    assert all("lora" in name for name in trainer.parameters)


def test_freezing_everything_is_refused():
    with pytest.raises(ValueError, match="Nothing is left to train"):
        make_trainer(freeze=("*",))


def test_masters_stay_float32_while_products_are_bfloat16():
    model = dataclasses.replace(PI0, dtype="bfloat16")
    small = CosineDecaySchedule(warmup_steps=0, peak_lr=1e-5, decay_steps=10)
    trainer = make_trainer(model=model, lr_schedule=small)
    seen = set()

    def note(module, inputs, output):  # noqa: ARG001
        seen.add(output.dtype)

    for layer in trainer.model.vlm.layers:
        layer.mlp.up.register_forward_hook(note)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.step(make_batch(), 0)
    assert seen == {torch.bfloat16}
    for tensors in (trainer.model.state_dict(), trainer.ema.mean, gradients(trainer)):
        assert {value.dtype for value in tensors.values()} == {torch.float32}
    # Steps too small for bfloat16 must not be lost.
    name = "vlm.layers.0.mlp.up.weight"
    after = trainer.model.state_dict()[name]
    moved = after != before[name]
    assert (moved & (after.bfloat16() == before[name].bfloat16())).any()


def test_the_mean_follows_the_weights():
    trainer = make_trainer(ema_decay=0.9)
    expected = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    for step in range(3):
        trainer.step(make_batch(), step)
        for name, parameter in trainer.parameters.items():
            expected[name] = 0.9 * expected[name] + 0.1 * parameter.detach()
    assert_close(trainer.ema.mean, expected, atol=1e-6, rtol=1e-5)
    own = copy.deepcopy(trainer.model.state_dict())
    with trainer.ema.applied():
        inside = copy.deepcopy(trainer.model.state_dict())
    assert_close({n: inside[n] for n in expected}, expected, atol=1e-6, rtol=1e-5)
    assert all(torch.equal(v, own[n]) for n, v in trainer.model.state_dict().items())


@pytest.mark.parametrize("model", [PI0, PI05, FAST, KI], ids=["pi0", "pi05", "fast", "ki"])
def test_a_step_reads_nothing_back_from_the_device(model, monkeypatch):
    """The meta device holds no numbers: whatever needs one of them on the host fails there."""
    optimizers = sys.modules["torch.optim.optimizer"]  # torch.optim hides it
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    config = dataclasses.replace(TINY, model=model, gradient_accumulation=2)
    if model is not FAST:
        config = dataclasses.replace(config, noise_draws=2, mask_padded_steps=True)
    meta = torch.device("meta")
    trainer = Trainer(config, weights.build_on_meta(model), Processes(0, 1, meta))
    outputs = [trainer.step(make_batch(model), number) for number in range(2)]
    assert all(t.is_meta for one in outputs for t in (one.gradient_norm, *one.losses.values()))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trainer.read(outputs)

"""Two real processes (gloo) do what one does, up to the rounding of sums."""

import dataclasses

import pytest

from piston.cli import main
from piston.config import AdamW
from piston.models.configs import LoRA
from piston.training.checkpoint import saved_steps
from piston.training.distributed import join_processes
from piston.training.loop import train_loop

from . import mixing, running
from .recording import LIBERO, recorded
from .running import assert_same_tensors, losses, metrics, run_together, state
from .tiny_presets import FAST, GEMMA, PI0, PI05, TINY

pytestmark = pytest.mark.slow

LORA = dataclasses.replace(PI0, vlm=dataclasses.replace(GEMMA, lora=LoRA(rank=2, alpha=2.0)))
# A gradient that is zero but for rounding (of a key's bias, which a softmax does not see) would
# otherwise become a whole step, in one direction or the other.
FIRM = AdamW(eps=1e-3)
TOLERANCE = 2e-5


def tiny(folder, **changes):
    return dataclasses.replace(running.tiny(folder), optimizer=FIRM, **changes)


CASES = {
    "pi0": {"model": PI0, "save_interval": 3},
    "parts": {"model": PI0, "gradient_accumulation": 2, "gradient_checkpointing": True},
    "pi05": {"model": PI05, "noise_draws": 3},
    "lora": {"model": LORA, "freeze": ("vision.*", "vlm.*", "!*lora*")},
    "fast": {"model": FAST},
    "validated": {},
    # Targets and insulation. Every part of a batch is one sample, which may lack actions or text.
    "mixture": {},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("data"), episodes=5, frames=9)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    mixing.record_all(folder)
    assert main(["stats", "tiny_mixture", *mixing.options(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, mixture):
    """(case, sharding) → the run's folder."""
    folder = tmp_path_factory.mktemp("runs")
    of_data = {**data, "model": LIBERO, "mask_padded_steps": True, "mask_padded_dims": True}
    mixed = mixing.mixture(mixture, folder, validation_episodes=0)
    cases = {
        **CASES,
        "validated": {**of_data, "validation_episodes": 2, "validation_interval": 2},
        "mixture": {
            field.name: getattr(mixed, field.name)
            for field in dataclasses.fields(mixed)
            if getattr(mixed, field.name) != getattr(TINY, field.name)
        },
    }
    found, together = {}, []
    for name, changes in cases.items():
        for sharding in ("none", "ddp", "fsdp"):
            own = {"checkpoint_base_dir": str(folder / sharding), "exp_name": name}
            config = tiny(folder, **{**changes, **own, "sharding": sharding})
            found[name, sharding] = config.checkpoint_dir
            if sharding == "none":
                train_loop(config)
            else:
                together.append(config)
    for sharding, other in (("ddp", "fsdp"), ("fsdp", "ddp")):
        # Two processes go on where two of the other kind stopped, or where one did.
        longer = {"num_train_steps": 8, "save_interval": 3, "resume": True, "sharding": other}
        together.append(tiny(folder / sharding, exp_name="pi0", **longer))
        train_loop(tiny(folder / sharding, exp_name="grown", num_train_steps=4))
        together.append(tiny(folder / sharding, exp_name="grown", **longer))
        found["grown", sharding] = together[-1].checkpoint_dir
    # What cannot work is refused by all processes.
    together.append(tiny(folder / "odd", batch_size=6, gradient_accumulation=2, sharding="ddp"))
    together.append(tiny(folder / "alone"))
    *results, odd, alone = run_together(together, folder)
    assert not [result for result in results if "error" in result]
    assert "must be a multiple of 4" in odd["error"]
    assert "--sharding ddp" in alone["error"]
    return found


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    return train_loop(tiny(tmp_path_factory.mktemp("uncut"), num_train_steps=10)).parent


def _gradient_norms(run):
    return [line["gradient_norm"] for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_one_does(runs, case, sharding):
    one, two = runs[case, "none"], runs[case, sharding]
    assert losses(two)[:6] == pytest.approx(losses(one), rel=1e-4)
    assert _gradient_norms(two)[:6] == pytest.approx(_gradient_norms(one), rel=1e-3)
    assert_same_tensors(state(one / "5"), state(two / "5"), TOLERANCE)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_validation_does_not_depend_on_the_number_of_processes(runs, sharding):
    one, two = (
        [line for line in metrics(runs["validated", s]) if "validation/loss" in line]
        for s in ("none", sharding)
    )
    assert [line["step"] for line in one] == [2, 4, 5]
    assert len(one[0]["validation/action_error_per_dim"]) == 7
    for ours, theirs in zip(one, two, strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_become_one(runs, uncut, sharding):
    """After two of one kind became two of the other."""
    run = runs["pi0", sharding]
    assert saved_steps(run) == [3, 5, 6, 7]
    train_loop(tiny(run.parent.parent, exp_name="pi0", resume=True, num_train_steps=10))
    assert losses(run) == pytest.approx(losses(uncut), rel=1e-4)
    assert_same_tensors(state(run / "9"), state(uncut / "9"), TOLERANCE)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_one_process_becomes_two(runs, uncut, sharding):
    assert losses(runs["grown", sharding]) == pytest.approx(losses(uncut)[:8], rel=1e-4)


def test_sharding_in_one_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="would do nothing in one process.*torchrun"):
        train_loop(tiny(tmp_path, sharding="fsdp"))
    assert not list(tmp_path.iterdir())


def test_one_process_needs_nothing_distributed():
    import torch.distributed as dist

    with join_processes(tiny("unused")) as processes:
        assert not dist.is_initialized()
        assert processes.is_first
        assert processes.sum(3.0, 4.0) == [3.0, 4.0]
        assert processes.from_first(lambda: "x") == "x"

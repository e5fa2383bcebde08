"""What goes into a checkpoint, and how it is written."""

import json
import os
import pickle
import random

import pytest
import torch

from piston.config import DataConfig
from piston.files import find_damage, write_manifest
from piston.training.checkpoint import (
    CheckpointWriter,
    copy_state,
    restore,
    saved_steps,
    state_tensors,
)

from .running import assert_same_tensors, state, tiny
from .test_step import ALONE, make_batch, make_trainer


def test_a_snapshot_holds_everything_once_and_stays_as_it_was():
    trainer = make_trainer()
    trainer.step(make_batch(), 0)
    saved, served = copy_state(trainer)
    own = {tensor.data_ptr() for tensor in state_tensors(trainer).values()}
    copies = {tensor.data_ptr() for tensor in saved.values()}
    assert not own & copies
    assert {tensor.data_ptr() for tensor in served.values()} <= copies  # no third copy
    before = {name: value.clone() for name, value in saved.items()}
    trainer.step(make_batch(), 1)
    assert_same_tensors(before, saved)


def test_a_trainer_is_restored_whole(tmp_path):
    trainer, config = make_trainer(), tiny(tmp_path)
    for step in range(3):
        trainer.step(make_batch(), step)
    with CheckpointWriter(config, tmp_path, ALONE, [DataConfig()]) as writer:
        writer.save(trainer, 2, {"a": 0.1})
        writer.finish()
    other = make_trainer(seed=1)
    assert restore(other, tmp_path / "2") == {"a": 0.1}
    assert_same_tensors(state_tensors(other), state_tensors(trainer))
    assert other.step(make_batch(), 3).gradient_norm != 0
    parts = {name.split("/")[0] for name in state(tmp_path / "2")}
    assert parts == {"model", "optimizer", "ema"}


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path):
    trainer, config = make_trainer(), tiny(tmp_path)
    trainer.step(make_batch(), 0)
    expected = {name: value.clone() for name, value in state_tensors(trainer).items()}
    with CheckpointWriter(config, tmp_path, ALONE, [DataConfig()]) as writer:
        writer.save(trainer, 0, {})
        trainer.step(make_batch(), 1)
        writer.save(trainer, 1, {})  # waits for the first
    assert saved_steps(tmp_path) == [0, 1]
    assert_same_tensors(state(tmp_path / "0"), expected)


def test_a_manifest_covers_every_file(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "a").write_bytes(b"1" * 1000)
    (tmp_path / "inside" / ".hidden").write_bytes(b"2")
    assert "not complete" in find_damage(tmp_path)
    write_manifest(tmp_path)
    assert find_damage(tmp_path) is None
    assert json.loads((tmp_path / "manifest.json").read_text()).keys() == {"a", "inside/.hidden"}
    (tmp_path / "inside" / ".hidden").write_bytes(b"3")
    assert find_damage(tmp_path) == "inside/.hidden is not as it was written"


def test_parameters_without_a_part_in_the_loss_are_kept_too():
    """The tail of the VLM's last layer has weights but no moments."""
    trainer = make_trainer()
    trainer.step(make_batch(), 0)
    tensors = state_tensors(trainer)
    unused = set(trainer.model.unused_parameters())
    assert unused
    assert all(f"model/{name}" in tensors and f"ema/{name}" in tensors for name in unused)
    assert not any(f"optimizer/{name}/step" in tensors for name in unused)
    used = set(trainer.parameters) - unused
    assert all(torch.is_tensor(tensors[f"optimizer/{name}/exp_avg"]) for name in used)


def test_folders_with_numbers_that_are_no_checkpoints_are_not_deleted(tmp_path):
    for name in ("1", "2024"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("precious")
    trainer = make_trainer()
    with CheckpointWriter(tiny(tmp_path, keep_last=1), tmp_path, ALONE, [DataConfig()]) as writer:
        for step in (3, 5):
            writer.save(trainer, step, {})
        writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2024", "5"]
    assert (tmp_path / "1/notes.txt").read_text() == "precious"


class _Harmful:
    """What a hostile file would hold: unpickling it creates a folder."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_a_training_state_cannot_run_code(tmp_path):
    trainer = make_trainer()
    with CheckpointWriter(tiny(tmp_path), tmp_path, ALONE, [DataConfig()]) as writer:
        writer.save(trainer, 0, {})
        writer.finish()
    witness = tmp_path / "witness"
    (tmp_path / "0" / "train_state" / ".metadata").write_bytes(pickle.dumps(_Harmful(witness)))
    with pytest.raises(ValueError, match=r"posix\.mkdir.*do not resume"):
        restore(make_trainer(), tmp_path / "0")
    assert not witness.exists()


# `PosixPath.unlink = 5`, written as pickle's own instructions: no program would store such a thing.
_CHANGES_A_CLASS = b"\x80\x04cpathlib\nPosixPath\nN}\x8c\x06unlinkK\x05s\x86b."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_CHANGES_A_CLASS, "sets attributes of <class 'pathlib.*PosixPath'>.*do not resume"),
        (b"", "cannot be read .*EOFError"),
        (b"no pickle", "cannot be read"),
        (b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b".", "cannot be read"),
        (pickle.dumps(5), "does not describe a saved training state"),
    ],
)
def test_a_training_state_that_is_no_record_of_dcp(tmp_path, content, message):
    (tmp_path / "train_state").mkdir()
    (tmp_path / "train_state/.metadata").write_bytes(content)
    before = vars(type(tmp_path)).copy()
    with pytest.raises(ValueError, match=message):
        restore(make_trainer(), tmp_path)
    assert vars(type(tmp_path)) == before


def test_a_damaged_description_of_a_state_is_an_error_that_names_it(tmp_path):
    with CheckpointWriter(tiny(tmp_path), tmp_path, ALONE, [DataConfig()]) as writer:
        writer.save(make_trainer(), 0, {})
        writer.finish()
    path, generator = tmp_path / "0" / "train_state" / ".metadata", random.Random(0)
    data, trainer, errors = path.read_bytes(), make_trainer(), []
    for _ in range(60):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        try:
            restore(trainer, tmp_path / "0")
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 30  # a changed bit may also do nothing
    assert all(str(tmp_path / "0") in error for error in errors)

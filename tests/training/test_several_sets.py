"""Training on several data sets of one robot: how often each is drawn, and what is refused."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from piston.cli import main
from piston.presets import cli
from piston.training import loop
from piston.training.loop import train_loop
from piston.transforms.normalize import read_norm_stats

from .recording import record, recorded, spoil
from .running import assert_same_run, tiny

FRAMES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def first(folder):
    """4 episodes of cups; beside them 2 of mugs."""
    changes = recorded(folder, episodes=4, frames=FRAMES)
    record(folder / "mugs", episodes=2, frames=FRAMES)
    return changes


def together(first, *others, shares=()):
    sets = {"more_sets": tuple(map(str, others)), "set_shares": tuple(shares)}
    return {**first, "data": dataclasses.replace(first["data"], **sets)}


@pytest.fixture
def drawn(monkeypatch):
    """(set, episode) of every sample that is trained on."""
    seen = []
    original = loop.Trainer.step

    def step(self, batch, number):
        seen.extend(zip(batch["set_index"].tolist(), batch["episode_index"].tolist()))
        return original(self, batch, number)

    monkeypatch.setattr(loop.Trainer, "step", step)
    return seen


def test_by_default_every_frame_counts_the_same(tmp_path, folder, first, drawn):
    # 48 frames are 12 batches of 4.
    train_loop(tiny(tmp_path, **together(first, folder / "mugs"), num_train_steps=12))
    assert Counter(drawn) == {
        **{(0, episode): FRAMES for episode in range(4)},
        **{(1, episode): FRAMES for episode in range(2)},
    }


def test_shares_say_how_often_each_set_is_drawn(tmp_path, folder, first, drawn):
    data = together(first, f"{folder / 'mugs'}#1", f"{folder / 'cups'}#!0,!1", shares=[2, 1, 1])
    # An epoch has as many samples as there are frames: 32 and 8 and 16, or 14 batches of 4.
    train_loop(tiny(tmp_path, **data, num_train_steps=14))
    assert Counter(which for which, _ in drawn) == {0: 28, 1: 14, 2: 14}
    assert {episode for which, episode in drawn if which == 1} == {1}
    assert {episode for which, episode in drawn if which == 2} == {2, 3}


def test_a_mixture_is_resumed_bit_for_bit(tmp_path, folder, first):
    data = together(first, folder / "mugs", shares=[1, 1])
    uncut = train_loop(tiny(tmp_path / "uncut", **data, num_train_steps=8)).parent
    train_loop(tiny(tmp_path, **data, num_train_steps=4))
    cut = train_loop(tiny(tmp_path, **data, num_train_steps=8, resume=True)).parent
    assert_same_run(cut, uncut, 7)


def test_episodes_of_every_set_are_held_out(tmp_path, folder, first, drawn):
    data = together(first, folder / "mugs")
    train_loop(tiny(tmp_path, **data, validation_episodes=1, num_train_steps=8))
    assert sorted(Counter(which for which, _ in drawn).items()) == [(0, 24), (1, 8)]
    assert len(set(drawn)) == 4


def test_what_is_wrong_with_another_set_names_it(tmp_path, folder, first):
    record(tmp_path / "spoilt", episodes=2, frames=FRAMES)
    spoil(tmp_path / "spoilt", "state", FRAMES + 3, [np.nan] * 8)
    data = together(first, folder / "mugs", tmp_path / "spoilt")
    with pytest.raises(ValueError, match=rf"of {tmp_path}/spoilt .*episode 1 \(frame 3\)") as found:
        train_loop(tiny(tmp_path, **data))
    assert f"'{tmp_path}/spoilt#!1' in --data.more-sets" in str(found.value)
    data = together(first, folder / "mugs", f"{tmp_path}/spoilt#!1")
    train_loop(tiny(tmp_path, **data))


def test_sets_of_other_robots_or_rates_are_refused(tmp_path, first):
    record(tmp_path / "slow", episodes=1, frames=FRAMES, fps=5, state_dim=9)
    with pytest.raises(ValueError, match=r"slow was not recorded like .*cups") as refused:
        train_loop(tiny(tmp_path, **together(first, tmp_path / "slow")))
    assert "the rate (fps) is 5" in str(refused.value)
    assert "the shape of 'state' is (9,) there, (8,) in" in str(refused.value)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1], "1 numbers for the data set and 1 in --data.more-sets"),
        ([1, 0], "each must be above 0"),
        ([1, float("inf")], "each must be above 0"),
    ],
)
def test_impossible_shares_are_refused(tmp_path, folder, first, shares, message):
    with pytest.raises(ValueError, match=message):
        train_loop(tiny(tmp_path, **together(first, folder / "mugs", shares=shares)))


@pytest.mark.usefixtures("first")
def test_statistics_are_of_all_sets(tmp_path, folder):
    def mean(*options):
        words = [
            *("stats", "pi0_libero", "--data.repo-id", str(folder / "cups"), *options),
            *("--data.assets.assets-dir", str(tmp_path), "--data.assets.asset-id", "found"),
        ]
        assert main(words) == 0
        return read_norm_stats(tmp_path / "found")["state"].mean

    cups, mugs = mean(), mean("--data.repo-id", str(folder / "mugs"))
    both = mean("--data.more-sets", str(folder / "mugs"))
    np.testing.assert_allclose(both, (4 * cups + 2 * mugs) / 6, atol=1e-6)
    some = mean("--data.more-sets", f"{folder / 'mugs'}#0", f"{folder / 'mugs'}#1")
    np.testing.assert_allclose(some, both, atol=1e-6)


def test_the_command_line_takes_sets_and_shares():
    sets, shares = ("--data.more-sets", "a/b", "c/d#!7"), ("--data.set-shares", "2", "1", "0.5")
    words = ["pi0_libero", "--exp-name", "x", *sets, *shares]
    pipeline = cli(words, prog="piston train").data_config()
    assert [(one.repo_id, one.episodes) for one in pipeline.each_set()[1:]] == [
        ("a/b", None),
        ("c/d", "!7"),
    ]
    assert pipeline.set_shares == (2, 1, 0.5)

"""Training on several data sets of one robot: how often each is drawn, and what is refused."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from piston.cli import main
from piston.cli.train import parse
from piston.config import AssetsConfig, DataConfig
from piston.data.dataset import LeRobotDataset
from piston.data.problems import EpisodeError, leave_out, leave_out_any
from piston.data.record import Recorder
from piston.data.samples import TrainingData
from piston.training import loop, trackers
from piston.training.checkpoint import saved_steps
from piston.training.loop import train_loop
from piston.transforms.normalize import read_norm_stats

from .recording import FEATURES, record, recorded, spoil
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
    sets = {"extra_datasets": tuple(map(str, others)), "set_shares": tuple(shares)}
    return {**first, "data": dataclasses.replace(first["data"], **sets)}


@pytest.fixture
def drawn(monkeypatch):
    """(set, episode) of every sample that is trained on."""
    seen = []
    original = loop.Trainer.step

    def step(self, batch, number, *more):
        seen.extend(zip(batch["set_index"].tolist(), batch["episode_index"].tolist()))
        return original(self, batch, number, *more)

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


def test_workers_take_turns_with_the_sets_as_one_process_does(tmp_path, folder, first):
    data = together(first, folder / "mugs", shares=[1, 2])
    alone = train_loop(tiny(tmp_path / "alone", **data)).parent
    helped = train_loop(tiny(tmp_path / "helped", **data, num_workers=2)).parent
    assert_same_run(helped, alone, 5)


@pytest.fixture
def validated(monkeypatch):
    """(set, episode) of every sample that is validated on."""
    seen = []
    original = loop.validate

    def note(trainer, samples, names):
        places = [samples[index] for index in range(len(samples))]
        seen[:] = [(int(one["set_index"]), int(one["episode_index"])) for one in places]
        return original(trainer, samples, names)

    monkeypatch.setattr(loop, "validate", note)
    return seen


def test_episodes_of_every_set_are_held_out(tmp_path, folder, first, drawn, validated):
    data = together(first, folder / "mugs")
    train_loop(tiny(tmp_path, **data, validation_episodes=1, num_train_steps=8))
    assert Counter(which for which, _ in drawn) == {0: 3 * FRAMES, 1: FRAMES}
    assert Counter(which for which, _ in validated) == {0: FRAMES, 1: FRAMES}
    assert not set(drawn) & set(validated)


def test_what_is_held_out_is_so_where_a_set_is_named_twice(
    tmp_path, folder, first, drawn, validated
):
    data = together(first, f"{folder / 'cups'}#0:3", f"{folder}/../{folder.name}/cups#1:4")
    train_loop(tiny(tmp_path, **data, validation_episodes=2, num_train_steps=12))
    outside = {episode for _, episode in validated}
    assert len(outside) == 2
    assert len(set(validated)) == 2  # each once, though several sets have them
    assert {episode for _, episode in drawn} == set(range(4)) - outside


def test_a_set_of_which_nothing_is_left_is_refused(tmp_path, folder, first, validated):
    train_loop(tiny(tmp_path, **first, validation_episodes=1))
    ((_, outside), *_) = validated
    data = together(first, f"{folder / 'cups'}#{outside}")
    with pytest.raises(ValueError, match=rf"All episodes chosen of .*cups \({outside}\) are held"):
        train_loop(tiny(tmp_path, exp_name="x", **data, validation_episodes=1))


def test_first_frames_and_the_frame_cache_are_for_all_sets(
    tmp_path, folder, first, drawn, monkeypatch
):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    decoded = []
    monkeypatch.setattr(
        "piston.data.dataset.LeRobotDataset._camera_frames",
        _noting(decoded, LeRobotDataset._camera_frames),
    )
    data = together(first, folder / "mugs")
    options = {"start_frames": 2, "start_weight": 3, "cache_frames": True}
    # 32 frames and 4 times 2 of them twice more, 16 and 2 times 2: 72 samples, 18 batches.
    train_loop(tiny(tmp_path, **data, **options, num_train_steps=18))
    assert Counter(which for which, _ in drawn) == {0: 48, 1: 24}
    decoded.clear()
    train_loop(tiny(tmp_path, **data, **options, num_train_steps=18, exp_name="again"))
    # Only what is compared with the cache: three frames of two cameras of each set.
    assert len(decoded) == 12


def _noting(calls, method):
    def noted(self, *arguments):
        calls.append(arguments)
        return method(self, *arguments)

    return noted


def test_the_log_says_what_is_trained_on(tmp_path, folder, first, caplog):
    caplog.set_level("INFO", logger="piston")
    data = together(first, f"{folder / 'mugs'}#1", shares=[3, 1])
    train_loop(tiny(tmp_path, **data, num_train_steps=4))
    assert "cups, 4 episodes, 32 samples, 75.0 % of the samples drawn" in caplog.text
    assert f"Set 1: {folder / 'mugs'}, 1 episodes, 8 samples, 25.0 %" in caplog.text
    data = together(first, f"{folder / 'mugs'}#1", shares=[1, 1])
    train_loop(tiny(tmp_path, **data, num_train_steps=6, resume=True))
    assert "mixture was 32 samples (75.0%), 8 samples (25.0%), now it is 32 samples" in caplog.text


def test_samples_whose_loss_is_not_finite_are_told_with_their_set(
    tmp_path, folder, first, monkeypatch, caplog
):
    original = TrainingData.__getitem__

    def spoilt(self, index):
        sample = original(self, index)
        if sample["set_index"] == 1 and sample["episode_index"] == 1:
            sample["actions"][2, 1] = np.inf
        return sample

    monkeypatch.setattr(TrainingData, "__getitem__", spoilt)
    monkeypatch.setattr(trackers, "MAX_SKIPPED_STEPS", 50)
    data = together(first, folder / "mugs")
    train_loop(tiny(tmp_path, **data, num_train_steps=12))
    told = [record.getMessage() for record in caplog.records if "skipped: loss" in record.message]
    assert told
    assert all(re.search(r"set 1 1/\d \(!\)", line) for line in told)
    assert any(re.search(r"set 0 \d/\d(,|$)", line) for line in told)


def test_a_damaged_frame_says_how_to_leave_its_episode_out(tmp_path, folder, first):
    record(tmp_path / "torn", episodes=2, frames=FRAMES)
    spoil(tmp_path / "torn", "image", FRAMES + 3, {"bytes": b"no picture", "path": None})
    data = together(first, folder / "mugs", f"{tmp_path}/torn#0:2")
    for options in ({}, {"cache_frames": True}):
        with pytest.raises(EpisodeError, match="episode 1, frame 3, image") as found:
            train_loop(tiny(tmp_path, **data, **options, num_train_steps=16, overwrite=True))
        advice = "\n".join(found.value.__notes__)
        assert f"'{tmp_path}/torn#0:2,!1' in --data.extra-datasets" in advice
        assert "--data.episodes" not in advice
    data = together(first, folder / "mugs", f"{tmp_path}/torn#0:2,!1")
    train_loop(tiny(tmp_path, **data, num_train_steps=16, overwrite=True))


def test_what_is_wrong_with_another_set_names_it(tmp_path, folder, first):
    record(tmp_path / "spoilt", episodes=2, frames=FRAMES)
    spoil(tmp_path / "spoilt", "state", FRAMES + 3, [np.nan] * 8)
    data = together(first, folder / "mugs", tmp_path / "spoilt")
    with pytest.raises(ValueError, match=rf"of {tmp_path}/spoilt .*episode 1 \(frame 3\)") as found:
        train_loop(tiny(tmp_path, **data))
    assert f"'{tmp_path}/spoilt#!1' in --data.extra-datasets" in str(found.value)
    data = together(first, folder / "mugs", f"{tmp_path}/spoilt#!1")
    train_loop(tiny(tmp_path, **data))


def test_sets_of_other_robots_or_rates_are_refused(tmp_path, first):
    record(tmp_path / "slow", episodes=1, frames=FRAMES, fps=5, state_dim=9)
    old = tmp_path / "tiny" / "run"
    train_loop(tiny(tmp_path, save_interval=3))
    with pytest.raises(ValueError, match=r"slow was not recorded like .*cups") as refused:
        train_loop(tiny(tmp_path, **together(first, tmp_path / "slow"), overwrite=True))
    assert "its rate is 5 frames per second, expected 10; 'state' has" in str(refused.value)
    assert "'state' has the shape (9,), expected (8,)" in str(refused.value)
    assert saved_steps(old) == [3, 5]  # seen before anything is deleted

    without_camera = dict(FEATURES)
    del without_camera["wrist_image"]
    with Recorder(tmp_path / "blind", fps=10, features=without_camera) as recorder:
        frame = {"image": np.zeros((40, 40, 3), np.uint8), "state": np.zeros(8, np.float32)}
        recorder.add_frame({**frame, "actions": np.zeros(7, np.float32)}, "wait")
        recorder.save_episode()
    with pytest.raises(KeyError, match="blind has no 'wrist_image'. Its cameras: image."):
        train_loop(tiny(tmp_path, **together(first, tmp_path / "blind"), overwrite=True))


def test_sets_that_call_things_by_other_names_are_told_of(tmp_path, first, caplog):
    record(tmp_path / "a", episodes=1, frames=FRAMES, names=list("abcdefgh"), robot_type="panda")
    record(tmp_path / "b", episodes=1, frames=FRAMES, names=list("hgfedcba"), robot_type="ur5")
    data = {**first, "data": dataclasses.replace(first["data"], repo_id=str(tmp_path / "a"))}
    train_loop(tiny(tmp_path, **together(data, tmp_path / "b")))
    assert "was recorded with ur5" in caplog.text
    assert "names the dimensions of 'state' ['h', 'g'" in caplog.text


def test_random_samples_have_no_further_sets(tmp_path):
    data = dataclasses.replace(tiny(tmp_path).data, extra_datasets=("a/b",))
    with pytest.raises(ValueError, match="--data.extra-datasets need a data set"):
        train_loop(tiny(tmp_path, data=data))


def test_missing_statistics_name_the_command_for_all_sets(tmp_path):
    words = ["pi0_libero", "--exp-name", "x", "--assets-base-dir", str(tmp_path), "--weights", "x"]
    chosen = ["--validation-episodes", "2", "--seed", "5"]
    config = parse([*words, *chosen, "--data.extra-datasets", "a/b", "c/d#!7"])
    data = dataclasses.replace(config.data, assets=AssetsConfig())
    with pytest.raises(FileNotFoundError, match="piston stats pi0_libero") as missing:
        train_loop(dataclasses.replace(config, data=data))
    assert "--data.extra-datasets a/b 'c/d#!7'" in str(missing.value)
    assert "--validation-episodes 2 --seed 5" in str(missing.value)


def test_a_choice_that_is_not_there_names_its_set(tmp_path, folder, first):
    with pytest.raises(ValueError, match="Episodes 7 were asked for") as refused:
        train_loop(tiny(tmp_path, **together(first, f"{folder / 'mugs'}#7")))
    assert refused.value.__notes__ == [f"in {folder / 'mugs'}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", ("a/b", None)),
        ("a/b#0:50,!7", ("a/b", "0:50,!7")),
        ("data/cups #2", ("data/cups ", "2")),
        ("data/c#major", ("data/c#major", None)),
        ("data/c#major#3-4", ("data/c#major", "3-4")),
    ],
)
def test_a_set_may_have_a_choice_behind_it(text, expected):
    _, other = DataConfig(repo_id="x", extra_datasets=(text,)).each_set()
    assert (other.repo_id, other.episodes) == expected


@pytest.mark.parametrize("text", ["", "#0:3"])
def test_a_set_without_a_name_is_refused(text):
    with pytest.raises(ValueError, match="names no data set"):
        DataConfig(repo_id="x", extra_datasets=(text,)).each_set()


def test_advice_for_a_run_of_several_sets():
    pipeline = DataConfig(repo_id="x", episodes="0:9", extra_datasets=("a/b", "c/d#1:4"))
    assert leave_out_any(pipeline.each_set()) == (
        "--data.episodes '0:9,!N', or of another set likewise: 'a/b#!N' in --data.extra-datasets"
    )
    options = [leave_out(one, [2]) for one in pipeline.each_set()]
    assert options == [
        "--data.episodes '0:9,!2'",
        "'a/b#!2' in --data.extra-datasets",
        "'c/d#1:4,!2' in --data.extra-datasets",
    ]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([1], "has 1 of 2 numbers"),
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
    both = mean("--data.extra-datasets", str(folder / "mugs"))
    np.testing.assert_allclose(both, (4 * cups + 2 * mugs) / 6, atol=1e-6)
    some = mean("--data.extra-datasets", f"{folder / 'mugs'}#0", f"{folder / 'mugs'}#1")
    np.testing.assert_allclose(some, both, atol=1e-6)


def test_the_command_line_takes_sets_and_shares():
    sets, shares = (
        ("--data.extra-datasets", "a/b", "c/d#!7"),
        ("--data.set-shares", "2", "1", "0.5"),
    )
    words = ["pi0_libero", "--exp-name", "x", *sets, *shares]
    pipeline = parse(words).data_config()
    assert [(one.repo_id, one.episodes) for one in pipeline.each_set()[1:]] == [
        ("a/b", None),
        ("c/d", "!7"),
    ]
    assert pipeline.set_shares == (2, 1, 0.5)

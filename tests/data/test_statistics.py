"""Statistics: equal to a slow, straightforward computation, whatever the data are like."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston import presets
from piston.cli import main, stats
from piston.config import DataConfig
from piston.data import open_dataset, statistics
from piston.data.pipeline import open_source, split_sources
from piston.data.protocol import Episode, Texts
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.robots import RobotInputs
from piston.transforms import Group
from piston.transforms.actions import SubsampleActions
from piston.transforms.normalize import read_norm_stats

from .pipelines import HORIZON, MODEL, SLOTS, data_config, three_joints
from .synthetic import Folder


class Columns:
    """A data set in memory: state and action of three dimensions, two tasks."""

    cameras = ("observation.images.top",)
    keys = ("observation.state", "action")
    root = "memory"

    def __init__(self, lengths, make, seed=0):
        stops = np.cumsum(lengths)
        self.episode_bounds = np.stack([stops - lengths, stops], axis=1)
        self.episodes = [Episode(10 + i, length) for i, length in enumerate(lengths)]
        random = np.random.default_rng(seed)
        self.columns = {key: make(random, (stops[-1], 3)) for key in self.keys}
        self.texts = {"task": Texts(("a", "b"), np.arange(stops[-1]) % 2)}

    def __len__(self):
        return int(self.episode_bounds[-1, 1])

    def column(self, key):
        return self.columns[key]


def slow(datasets, frames=None):
    """Frame by frame and step by step, everything kept, in float64."""
    states, actions = [], []
    for dataset in datasets:
        for start, stop in dataset.episode_bounds:
            for frame in range(start, stop):
                state = dataset.columns["observation.state"][frame]
                states.append(state)
                for step in range(HORIZON):
                    action = dataset.columns["action"][min(frame + step, stop - 1)].copy()
                    action[:2] -= state[:2]
                    actions.append(action)
    everything = {"state": np.array(states), "actions": np.array(actions)}
    if frames is not None:
        everything = {
            "state": everything["state"][frames],
            "actions": everything["actions"].reshape(-1, HORIZON, 3)[frames].reshape(-1, 3),
        }
    return {key: values.astype(np.float64) for key, values in everything.items()}


def columns_of(dataset, **changes):
    return TransformedColumns(dataset, data_config("memory", **changes), HORIZON)


def assert_equal(found, values, rtol=1e-6):
    for key, expected in values.items():
        result = found[key].norm_stats
        scale = expected.std(axis=0) + 1e-12
        assert found[key].count == len(expected)
        assert np.all(np.abs(result.mean - expected.mean(axis=0)) <= rtol * scale)
        np.testing.assert_allclose(result.std, expected.std(axis=0), rtol=rtol, atol=1e-12)
        np.testing.assert_array_equal(found[key].minimum, expected.min(axis=0))
        np.testing.assert_array_equal(found[key].maximum, expected.max(axis=0))
    assert_quantiles(found, values)


def assert_quantiles(found, values):
    for key, expected in values.items():
        quantiles = np.quantile(expected, [0.01, 0.99], axis=0)
        rounding = 1e-15 * np.abs(expected).max()
        np.testing.assert_allclose(
            found[key].norm_stats.quantiles, quantiles, rtol=1e-12, atol=rounding
        )


def normal(random, shape):
    return random.normal(0.3, 2.0, shape).astype(np.float32)


KINDS = {
    "normal": normal,
    "far from zero": lambda random, shape: random.normal(1000, 0.01, shape),
    "far from zero, float32": lambda random, shape: random.normal(1000, 0.01, shape).astype("f4"),
    "constant": lambda _, shape: np.full(shape, 0.1, np.float32),
    "gripper": lambda random, shape: (random.random(shape) < 0.4).astype(np.float32),
    "rarely closed": lambda random, shape: (random.random(shape) < 0.009).astype(np.float32),
    "heavy tails": lambda random, shape: random.standard_cauchy(shape).astype(np.float32),
    "whole numbers": lambda random, shape: random.integers(-5, 6, shape),
    "sorted": lambda random, shape: np.sort(random.random(shape), axis=0),
    "outliers": lambda random, shape: np.where(
        random.random(shape) < 0.002, 1e6 * random.normal(0, 1, shape), random.normal(0, 1, shape)
    ),
    "very heavy tails": lambda random, shape: random.standard_cauchy(shape) ** 3,
    "duplicates": lambda random, shape: random.normal(0, 1, shape).round(1),
    "two clusters": lambda random, shape: (
        np.where(random.random(shape) < 0.01, -1e4, 1e4) + random.normal(0, 1e-3, shape)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_slow_computation(kind, monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 1000)  # many blocks, cut within episodes
    monkeypatch.setattr(statistics, "SAMPLED_FRAMES", 256)
    dataset = Columns([400, 3, 1, 700, 250], KINDS[kind])
    found = compute_statistics([columns_of(dataset)])
    assert_equal(found, slow([dataset]))


def test_mean_1000_and_std_001_over_many_values():
    dataset = Columns([5000] * 8, KINDS["far from zero"])
    result = compute_statistics([columns_of(dataset)])["state"].norm_stats
    expected = dataset.columns["observation.state"]
    np.testing.assert_allclose(result.mean, expected.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(result.std, expected.std(axis=0), rtol=1e-9)


def test_few_samples():
    for length in (1, 2, 3, 101):
        dataset = Columns([length], normal)
        assert_equal(compute_statistics([columns_of(dataset)]), slow([dataset]))


@pytest.mark.parametrize("kind", ["sorted", "outliers", "two clusters", "gripper"])
def test_a_misleading_sample_costs_time_but_no_accuracy(kind, monkeypatch):
    """The sample holds the smallest values only: q01 is not among those that are kept."""
    shown = []
    monkeypatch.setattr(statistics, "_choose", lambda frames, count, _: frames[:count])
    monkeypatch.setattr(statistics, "SAMPLED_FRAMES", 1000)
    dataset = Columns([5000], lambda random, shape: np.sort(KINDS[kind](random, shape), axis=0))
    progress = lambda done, total: shown.append((done, total))  # noqa: E731
    found = compute_statistics([columns_of(dataset)], progress=progress)
    assert_equal(found, slow([dataset]))
    num_passes = shown.count((5000, 5000))
    assert num_passes == 1 if kind == "gripper" else 1 < num_passes < 5


def test_several_data_sets_are_one_whatever_their_sizes():
    sets = [
        Columns([300, 200], normal, seed=1),
        Columns([40], lambda r, s: normal(r, s) * 9 + 50, seed=2),
    ]
    merged = compute_statistics([columns_of(dataset) for dataset in sets])
    assert_equal(merged, slow(sets))
    halves = [compute_statistics([columns_of(dataset)]) for dataset in sets]
    averaged = np.mean([half["state"].norm_stats.q99 for half in halves], axis=0)
    assert not np.allclose(averaged, merged["state"].norm_stats.q99, rtol=0.1)


def test_data_sets_of_different_dimensions_have_no_common_statistics():
    other = Columns([20], normal)
    other.columns = {key: value[..., :2] for key, value in other.columns.items()}
    absolute = columns_of(other, data_transforms=Group(inputs=(three_joints,)))
    with pytest.raises(ValueError, match="3 dimensions in one data set and 2 in another"):
        compute_statistics([columns_of(Columns([20], normal)), absolute])


def test_max_frames_takes_so_many_at_random_and_always_the_same():
    dataset = Columns([500, 500], normal)
    first, again = (compute_statistics([columns_of(dataset)], max_frames=100) for _ in range(2))
    assert first["state"].count == 100
    assert first["actions"].count == 100 * HORIZON
    assert first["actions"].norm_stats == again["actions"].norm_stats
    chosen = np.sort(np.random.default_rng(0).choice(1000, 100, replace=False))
    assert_equal(first, slow([dataset], chosen))
    assert compute_statistics([columns_of(dataset)], max_frames=5000)["state"].count == 1000
    with pytest.raises(ValueError, match="at least 1"):
        compute_statistics([columns_of(dataset)], max_frames=0)


def test_threads_do_not_change_a_bit(monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 500)
    dataset = Columns([600], normal)
    one, four = (compute_statistics([columns_of(dataset)], num_threads=n) for n in (1, 4))
    assert all(one[key].norm_stats == four[key].norm_stats for key in one)


def test_a_bad_value_is_named_with_episode_and_frame():
    dataset = Columns([50, 60], normal)
    dataset.columns["observation.state"][73, 1] = np.nan
    table = RobotInputs("arm", SLOTS, {"state": 3}, {"actions": 3}, "images", optional=tuple(SLOTS))

    def careless(data):
        return {key: data[key] for key in ("state", "actions")}

    for robot in (table, careless):
        with pytest.raises(ValueError, match="'state' is NaN.*frame 23 of episode 11"):
            compute_statistics([columns_of(dataset, data_transforms=Group(inputs=(robot,)))])


def test_prompts_and_padding_are_there_for_transforms_that_look():
    seen = []

    def look(data):
        seen.append((data["prompt"], data["action_is_pad"], data["images"]["top"].shape))
        return three_joints(data)

    dataset = Columns([4, 9], normal)
    columns = columns_of(dataset, robot=(look,), prompt_from_task=True)
    columns.block(np.array([2, 3, 4]))
    prompts, is_pad, pixels = seen[-1]
    assert prompts.tolist() == ["a", "b", "a"]
    assert is_pad.sum(axis=1).tolist() == [HORIZON - 2, HORIZON - 1, 0]
    assert pixels == (3, 1, 1, 3)


def test_thinned_chunks_are_what_is_counted():
    dataset = Columns([30], normal)
    thin = compute_statistics([columns_of(dataset, robot=(three_joints, SubsampleActions(2)))])
    assert thin["actions"].count == 30 * HORIZON // 2


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_blocks_equal_items_of_a_real_data_set(tmp_path, version):
    folder = Folder(tmp_path / "set", version)
    config = data_config(folder.root)
    dataset = open_source(config, MODEL)
    block = TransformedColumns(dataset, config, HORIZON).block(np.arange(len(dataset)))
    transforms = (*config.repack_transforms.inputs, *config.data_transforms.inputs)
    for index in range(len(dataset)):
        item = dataset[index]
        for transform in transforms:
            item = transform(item)
        for key in ("state", "actions"):
            np.testing.assert_array_equal(block[key][index], item[key])


def test_nothing_is_decoded(tmp_path, monkeypatch):
    folder = Folder(tmp_path / "set")
    monkeypatch.setattr("piston.data.video.VideoReader.__init__", None)
    dataset = open_source(data_config(folder.root), MODEL)
    compute_statistics([TransformedColumns(dataset, data_config(folder.root), HORIZON)])


@settings(deadline=None)
@given(
    values=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 60), st.just(3)),
        elements=st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, 1.0 + 1e-9])),
    ),
    sampled=st.integers(1, 60),
    block=st.integers(1, 1000),
)
def test_any_values_any_sample_and_any_blocks_give_the_exact_statistics(values, sampled, block):
    dataset = Columns([len(values)], lambda *_: values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_choose", lambda frames, count, _: frames[:count])
        patch.setattr(statistics, "SAMPLED_FRAMES", sampled)
        patch.setattr(statistics, "BLOCK_VALUES", block)
        found = compute_statistics([columns_of(dataset)], num_threads=1)
    everything = slow([dataset])
    assert_quantiles(found, everything)
    for key, expected in everything.items():
        result, scale = found[key].norm_stats, np.abs(expected).max() + 1e-9
        np.testing.assert_allclose(result.mean, expected.mean(axis=0), atol=1e-12 * scale)
        np.testing.assert_allclose(result.std, expected.std(axis=0), rtol=1e-6, atol=1e-7 * scale)
        np.testing.assert_array_equal(found[key].minimum, expected.min(axis=0))
        np.testing.assert_array_equal(found[key].maximum, expected.max(axis=0))


def test_far_outliers_are_found():
    def one_far(random, shape):
        values = random.random(shape).astype(np.float32)
        values[7, 1] = 60.0
        return values

    dataset = Columns([900], one_far)
    assert compute_statistics([columns_of(dataset)])["state"].far_outliers() == [1]


@pytest.fixture
def aloha_set(tmp_path):
    """14 joints, of which one never moves and one has a far outlier."""
    from piston.data.record import Recorder

    names = [f"joint_{i}" for i in range(14)]
    numbers = {"dtype": "float32", "shape": [14], "names": names}
    features = {
        "observation.images.top": {"dtype": "video", "shape": [64, 64, 3]},
        "observation.state": numbers,
        "action": numbers,
    }
    random = np.random.default_rng(0)
    with Recorder(tmp_path / "set", fps=10, features=features, codec="h264") as recorder:
        for episode in range(2):
            for frame in range(120):
                state = random.uniform(0.2, 0.8, 14).astype(np.float32)
                state[3] = 0.5
                state[9] += 80.0 * (episode == 1 and frame == 50)
                image = np.full((64, 64, 3), frame, np.uint8)
                values = {"observation.images.top": image, "observation.state": state}
                recorder.add_frame({**values, "action": state}, task="move")
            recorder.save_episode()
    return tmp_path / "set"


def test_the_command_writes_where_the_preset_looks_and_warns_by_name(
    aloha_set, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    overrides = ["--data.repo-id", str(aloha_set), "--data.assets.asset-id", "mine"]
    assert main(["stats", "pi0_aloha_sim", *overrides]) == 0
    shown = capsys.readouterr().out
    assert "joint_3 (dimension 3) never moves" in shown
    assert "state: joint_9 has far outliers" in shown
    assert "240 of 240 frames" in shown
    assert "all values are counted, the statistics are exact" in shown
    assert "█" in shown
    written = read_norm_stats(tmp_path / "assets" / "pi0_aloha_sim" / "mine")
    state = open_dataset(aloha_set, cameras=()).column("observation.state").astype(np.float64)
    np.testing.assert_allclose(np.abs(written["state"].mean[:6]), state.mean(axis=0)[:6], rtol=1e-6)
    text = (tmp_path / "assets/pi0_aloha_sim/mine/norm_stats.json").read_text()
    assert list(json.loads(text)["norm_stats"]) == ["state", "actions"]

    assert main(["stats", "pi0_aloha_sim", *overrides, "--max-frames", "50"]) == 0
    shown = capsys.readouterr().out
    assert "50 of 240 frames" in shown
    assert "exact" not in shown
    assert "a random choice of 50 frames: one standard error of a mean is 0.13 std" in shown

    assert main(["stats", "pi0_aloha_sim", *overrides, "--data.episodes", "!1"]) == 0
    shown = capsys.readouterr().out
    assert "far outliers" not in shown


def test_statistics_are_those_of_the_episodes_that_are_trained_on(
    aloha_set, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    overrides = ["--data.repo-id", str(aloha_set), "--data.assets.asset-id", "mine"]
    overrides += ["--validation-episodes", "1"]
    assert main(["stats", "pi0_aloha_sim", *overrides]) == 0
    assert "120 of 120 frames" in capsys.readouterr().out
    dataset = open_dataset(aloha_set, cameras=())
    seed = presets.get("pi0_aloha_sim").seed
    [(kept, held_out)] = split_sources([DataConfig()], [dataset], 1, seed=seed)
    assert len(kept) == len(held_out) == 1
    state = dataset.select(kept).column("observation.state").astype(np.float64)
    written = read_norm_stats(tmp_path / "assets" / "pi0_aloha_sim" / "mine")
    np.testing.assert_allclose(np.abs(written["state"].mean[:6]), state.mean(axis=0)[:6], rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["debug"], "random samples"),
        (["pi0_aloha_pen_uncap"], "which are there already"),
        (["pi0_alhoa_sim"], "Did you mean 'pi0_aloha_sim'"),
        (["pi0_aloha_sim", "--max-frames", "0"], "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(args, message, capsys):
    assert main(["stats", *args]) == 1
    assert message in capsys.readouterr().err


def test_a_histogram_shows_where_values_are():
    values = np.concatenate([np.zeros(100), np.ones(50), [0.5]])
    drawn = stats.histogram(values, 0.0, 1.0)
    assert len(drawn) == stats.NUM_BINS
    assert drawn[0] == "█"
    assert drawn[-1] == "▄"
    assert drawn.count("▁") == 1
    assert stats.histogram(np.zeros(5), 0.0, 0.0) == "█"

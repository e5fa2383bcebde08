"""A dataset format is one class and a row: here .npz files (`npz_episodes`), beside LeRobot's."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.training.recording import recorded
from tests.training.running import assert_same_run, tiny

from piston.cli import main
from piston.data import check_dataset
from piston.data.cache import CachedFrames
from piston.data.loader import Loader, Order
from piston.data.mixture import BLOCKS_PER_WINDOW, RepeatedStarts, WeightedMixture, epoch_order
from piston.data.open import open_at
from piston.data.pipeline import open_source, open_training_data
from piston.data.protocol import Dataset
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.data.view import View, select
from piston.training.loop import train_loop
from piston.transforms.images import resize_with_pad

EXAMPLES = Path(__file__).parents[2] / "examples" / "extending"
with pytest.MonkeyPatch.context() as patch:
    # By this name, worker processes can import it as well.
    patch.syspath_prepend(str(EXAMPLES))
    from npz_episodes import NpzEpisodes, read_block

EPISODES, FRAMES, PIXELS = 20, 6, 40
DOCS = EXAMPLES.parents[1] / "docs"


def write(root: Path, *, nan: bool = False) -> Path:
    random = np.random.default_rng(7)
    root.mkdir()
    for number in range(EPISODES):
        length = FRAMES + number % 3
        images = random.integers(256, size=(2, length, PIXELS, PIXELS, 3), dtype=np.uint8)
        state = random.normal(size=(length, 8)).astype(np.float32)
        if nan and number == 4:
            state[2, 1] = np.nan
        np.savez(
            root / f"episode_{number:03d}.npz",
            image=images[0],
            wrist_image=images[1],
            state=state,
            actions=random.normal(size=(length, 7)).astype(np.float32),
            task=f"put the cup on plate {number % 4}",
        )
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("npz") / "episodes")


@pytest.fixture(scope="module")
def changes(folder, tmp_path_factory):
    """A LeRobot dataset of 3 episodes, and the .npz files as a further one of the same robot."""
    made = recorded(tmp_path_factory.mktemp("data"), episodes=3, frames=8)
    data = dataclasses.replace(made["data"], extra_datasets=(str(folder),))
    return {**made, "data": data}


@pytest.fixture
def pipeline(changes):
    """The pipeline of the .npz files, and the model."""
    config = changes["data"].create(Path(), changes["model"])
    return config.each_set()[1].with_norm_stats(), changes["model"]


def test_it_is_opened_by_its_row(folder):
    dataset: Dataset = open_at(folder)
    assert isinstance(dataset, NpzEpisodes)
    assert len(dataset) == sum(episode.length for episode in dataset.episodes)


def test_a_view_has_chunks_and_some_episodes(pipeline):
    config, model = pipeline
    source = open_source(config, model)
    whole = NpzEpisodes(source.root)
    some = select(source, "2:4")
    first = sum(episode.length for episode in whole.episodes[:2])
    assert [episode.index for episode in some.episodes] == [2, 3]
    length, actions = some.episodes[0].length, whole.column("actions")[first:]
    for step in range(length):
        item, plain = some[step], whole[first + step]
        rows = np.minimum(np.arange(step, step + model.action_horizon), length - 1)
        np.testing.assert_array_equal(item["actions"], actions[rows])
        np.testing.assert_array_equal(
            item["actions_is_pad"], np.arange(step, step + model.action_horizon) >= length
        )
        for key in ("image", "wrist_image", "state", "task"):
            np.testing.assert_array_equal(item[key], plain[key])
        place = item["episode_index"], item["frame_index"], item["index"]
        assert place == (2, step, first + step)
    with pytest.raises(IndexError, match="no frame"):
        some[len(some)]
    assert not {"image", "wrist_image"} & select(some, cameras=()).__getitem__(0).keys()


def test_a_key_that_it_lacks_is_named(pipeline):
    config, model = pipeline
    wrong = dataclasses.replace(config, action_sequence_keys=("action",))
    with pytest.raises(KeyError, match="has no 'action'. Did you mean 'actions'"):
        open_source(wrong, model)


def test_statistics_are_those_of_all_chunks(pipeline):
    config, model = pipeline
    source = open_source(config, model)
    found = compute_statistics([TransformedColumns(source, config, model.action_horizon)])
    state = source.column("state").astype(np.float64)
    np.testing.assert_allclose(found["state"].norm_stats.mean, state.mean(axis=0), rtol=1e-6)
    chunks = np.concatenate([source[i]["actions"] for i in range(len(source))]).astype(np.float64)
    stats = found["actions"].norm_stats
    np.testing.assert_allclose(stats.std, chunks.std(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats.quantiles, np.quantile(chunks, [0.01, 0.99], axis=0))


def test_it_is_checked(folder, tmp_path, capsys):
    assert check_dataset(folder) == []
    assert main(["data", "check", str(folder)]) == 0
    assert "npz episodes, 20 episodes, cameras: image, wrist_image" in capsys.readouterr().out
    assert main(["data", "info", str(folder)]) == 0
    assert "20 episodes, 139 frames, 10 fps" in " ".join(capsys.readouterr().out.split())
    [problem] = check_dataset(write(tmp_path / "spoilt", nan=True))
    assert (problem.severity, problem.episode) == ("error", 4)
    assert "state is NaN or infinite in 1 rows, the first is 2" in problem.what


def test_its_frames_are_cached(pipeline, tmp_path):
    config, model = pipeline
    source = open_source(config, model)
    cached = CachedFrames(source, 16, tmp_path)
    cached.build()
    read_block.cache_clear()
    for index in (0, 50, len(source) - 1):
        found = cached[index]
        assert read_block.cache_info().misses == 0
        for key, value in source[index].items():
            shown = resize_with_pad(value, 16, 16) if key in source.cameras else value
            np.testing.assert_array_equal(found[key], shown)
        read_block.cache_clear()
    before = cached.folders["image"].name
    path = source.root / "episode_000.npz"
    path.touch()
    assert CachedFrames(source, 16, tmp_path).folders["image"].name != before


def test_it_trains_in_a_mixture_and_resumes_bit_for_bit(changes, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run = {
        **changes,
        "validation_episodes": 1,
        "validation_interval": 2,
        "start_frames": 2,
        "start_weight": 2,
    }
    uncut = train_loop(tiny(tmp_path / "uncut", **run, num_train_steps=6)).parent
    train_loop(tiny(tmp_path / "cut", **run, num_train_steps=3))
    resumed = {**run, "resume": True, "num_workers": 2}
    cut = train_loop(tiny(tmp_path / "cut", **resumed, num_train_steps=6)).parent
    assert_same_run(cut, uncut, 5)


def test_every_block_is_read_once_per_epoch(pipeline):
    config, model = pipeline
    data = open_training_data(config, model)
    assert len(data.blocks) == EPISODES > 2 * BLOCKS_PER_WINDOW
    order = Order(data, 4, seed=3)
    read_block.cache_clear()
    with Loader(data, order) as loader:
        for _ in range(len(data) // 4):
            next(loader)
    assert read_block.cache_info().misses == EPISODES
    plain = np.random.default_rng(0).permutation(len(data))
    read_block.cache_clear()
    for index in plain:
        data[int(index)]
    assert read_block.cache_info().misses > 2 * EPISODES


class Blocks:
    """Numbers, in blocks of these lengths."""

    def __init__(self, *lengths):
        stops = np.cumsum(lengths)
        self.blocks = np.stack([stops - lengths, stops], axis=1)
        self._length = int(stops[-1])

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return index


def changes_of_window(order, samples, num_blocks=BLOCKS_PER_WINDOW):
    """How many blocks the samples of every window are from."""
    owners = np.searchsorted(samples.blocks[:, 1], order, side="right")
    firsts = {block: int(np.argmax(owners == block)) for block in np.unique(owners)}
    in_order = sorted(firsts, key=firsts.get)
    windows = [in_order[i : i + num_blocks] for i in range(0, len(in_order), num_blocks)]
    ends = np.cumsum([sum(int((owners == block).sum()) for block in one) for one in windows])
    return [set(part.tolist()) == set(one) for part, one in zip(np.split(owners, ends), windows)]


def test_the_order_of_blocks_is_a_function_of_seed_and_position():
    samples = Blocks(*[3, 5, 2, 7] * 6)
    first, again, other, later = (
        epoch_order(samples, *key) for key in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    np.testing.assert_array_equal(first, again)
    for order in (first, other, later):
        assert sorted(order) == list(range(len(samples)))
        assert all(changes_of_window(order, samples))
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, later)
    order = Order(samples, 4, seed=1)
    taken = [order.take(position).tolist() for position in range(0, len(samples) - 4, 4)]
    alone = [Order(samples, 4, seed=1).take(4 * number).tolist() for number in (9, 2)]
    assert alone == [taken[9], taken[2]]
    ranks = [Order(samples, 4, seed=1, rank=rank, world_size=2).take(8) for rank in range(2)]
    assert np.concatenate(ranks).tolist() == taken[2]


def test_a_position_in_an_order_without_blocks_is_another_one(caplog):
    samples = Blocks(4, 6, 5)
    state = Order(samples, 5, seed=0).state_dict(5)
    assert Order(samples, 5, seed=0).position_of(state) == 5
    assert not caplog.records
    Order(range(15), 5, seed=0).position_of(state)
    assert "blocks was [3], now it is None" in caplog.text


def test_blocks_stay_together_in_a_mixture():
    samples, plain = Blocks(*[4] * 30), range(60)
    mixture = WeightedMixture([plain, samples], [1, 2])
    alone = WeightedMixture([plain, range(120)], [1, 2])
    for epoch in range(3):
        order, without = (one.plan(seed=5, epoch=epoch) for one in (mixture, alone))
        # The other dataset's samples are where they would be without blocks.
        np.testing.assert_array_equal(order[order < 60], without[without < 60])
        np.testing.assert_array_equal(order < 60, without < 60)
        own = order[order >= 60] - 60
        assert sorted(own) == list(range(120))
        assert all(changes_of_window(own, samples))


def test_repeated_starts_belong_to_their_blocks():
    samples = Blocks(4, 6, 5)
    repeated = RepeatedStarts(samples, [4, 6, 5], 2, 3)
    assert len(repeated) == 15 + 3 * 2 * 2
    for start, stop in repeated.blocks:
        found = np.array([repeated[int(i)] for i in range(start, stop)])
        [block] = {*np.searchsorted(samples.blocks[:, 1], found, side="right").tolist()}
        assert {*found.tolist()} == {*range(*samples.blocks[block])}


@pytest.mark.parametrize("blocks", [[(0, 5), (6, 10)], [(0, 10), (10, 10)], [(0, 8)], []])
def test_blocks_that_do_not_have_all_samples_are_refused(blocks):
    samples = Blocks(10)
    samples.blocks = blocks
    with pytest.raises(ValueError, match="expected .start, stop. of ascending ranges"):
        epoch_order(samples, 0)


def test_a_column_is_read_when_it_is_asked_for(folder, monkeypatch):
    asked = []
    column = NpzEpisodes.column
    monkeypatch.setattr(
        NpzEpisodes, "column", lambda self, key: asked.append(key) or column(self, key)
    )
    view = View(NpzEpisodes(folder), {"actions": 3})
    assert asked == []
    view.column("state")
    view.column("state")
    assert asked == ["state"]


def test_any_dataset_has_chunks_of_images_and_of_steps_before(folder):
    whole = NpzEpisodes(folder)
    view = View(whole, {"state": [-0.1, 0.0], "image": 2}, "1:")
    start, length = whole.episodes[0].length, whole.episodes[1].length
    first, last = view[0], view[length - 1]
    np.testing.assert_array_equal(first["state"], whole.column("state")[[start, start]])
    assert first["state_is_pad"].tolist() == [True, False]
    end = whole[start + length - 1]["image"]
    np.testing.assert_array_equal(last["image"], [end, end])
    assert last["image_is_pad"].tolist() == [False, True]
    with pytest.raises(KeyError, match="has no 'wrist_imagee'. Did you mean 'wrist_image'"):
        view.select(cameras=["wrist_imagee"])


def test_the_page_shows_this_class():
    program = (EXAMPLES / "npz_episodes.py").read_text("utf-8")
    assert program in (DOCS / "extending.md").read_text("utf-8")

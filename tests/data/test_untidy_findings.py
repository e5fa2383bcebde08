"""What the reader must not do with untidy sets.

Issue 4: reading never stops in the middle of a run on what the check would have found, and never
silently returns a wrong frame.
"""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.pipelines import MODEL, data_config
from tests.data.synthetic import FPS, Folder, write_video

from piston.cli import main
from piston.data import check_dataset, open_dataset
from piston.data.cache import CachedFrames
from piston.data.check import usable
from piston.data.convert import convert_to_v30
from piston.data.loader import Order
from piston.data.mixture import WeightedMixture
from piston.data.pipeline import open_source
from piston.data.samples import TrainingData
from piston.transforms.images import resize_with_pad
from piston.verification import data

TOP = "observation.images.top"


def readable(dataset):
    """Every frame that is handed out, by episode and step."""
    frames = {}
    for episode, (start, stop) in zip(dataset.episodes, dataset.episode_bounds):
        for row in range(start, stop):
            frames[episode.index, row - start] = dataset.frame(int(row))[TOP]
    return frames


def test_episodes_that_claim_the_same_frames_are_not_read(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    right = readable(open_dataset(folder.root))
    rows = [folder.episode_row(episode) for episode in range(3)]
    rows[1][f"videos/{TOP}/from_timestamp"] -= 1 / FPS
    folder.write_episodes(rows)
    found = readable(open_dataset(folder.root))
    assert all(np.array_equal(frame, right[place]) for place, frame in found.items())


def test_a_video_at_twice_the_declared_rate_is_not_read_by_every_second_frame(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    for episode in range(3):
        write_video(folder.video_path(episode), folder.pictures(episode), fps=2 * FPS)
    with pytest.raises(ValueError, match="episode"):
        open_dataset(folder.root).frame(1)  # row 1 gets frame 2


def cached(root, folder, episodes=None):
    dataset = open_dataset(root, episodes=episodes)
    frames = CachedFrames(dataset, 32, folder)
    frames.build()
    return dataset, frames


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([0, None, 21], id="a row is missing"),
        pytest.param([0, 0, 0], id="dataset_from_index repeats"),
    ],
)
def test_the_cache_does_not_trust_dataset_from_index(tmp_path, starts):
    folder = Folder(tmp_path / "set", "v3.0")
    rows = [
        {**folder.episode_row(episode), "dataset_from_index": start}
        for episode, start in enumerate(starts)
        if start is not None
    ]
    folder.write_episodes(rows)
    dataset, frames = cached(folder.root, tmp_path / "cache")
    for index in range(len(dataset)):
        expected = resize_with_pad(dataset[index][TOP], 32, 32)
        np.testing.assert_array_equal(frames[index][TOP], expected)


def test_the_last_item_of_a_cached_subset(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    dataset, frames = cached(folder.root, tmp_path / "cache", episodes=[0, 1])
    np.testing.assert_array_equal(frames[-1][TOP], resize_with_pad(dataset[-1][TOP], 32, 32))


@pytest.mark.parametrize("trouble", ["no list of tasks", "unknown task_index"])
def test_training_takes_the_task_that_the_check_promised(tmp_path, trouble):
    folder = Folder(tmp_path / "set", "v2.1")
    if trouble == "no list of tasks":
        (folder.root / "meta/tasks.jsonl").unlink()
    else:
        folder.rewrite(1, task_index=pa.array(np.full(folder.lengths[1], 99)))
    assert usable(check_dataset(folder.root))
    config = data_config(folder.root, prompt_from_task=True)
    data = TrainingData(open_source(config, MODEL), config, MODEL)
    for index in range(len(data)):
        data[index]


def test_a_set_with_nan_is_not_called_usable_or_does_without_the_episode(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    state = np.full((folder.lengths[1], 3), np.nan, np.float32).tolist()
    folder.rewrite(1, observation__state=pa.array(state, pa.list_(pa.float32())))
    problems = check_dataset(folder.root)
    left = {episode.index for episode in open_dataset(folder.root).episodes}
    assert not usable(problems) or 1 not in left


def damage_page(folder):
    """A data file whose footer is whole and whose first page is not."""
    path = folder.data_path(1)
    data = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    data[place : place + 40] = bytes(255 - value for value in data[place : place + 40])
    path.write_bytes(bytes(data))


def test_a_damaged_page_costs_its_own_episode(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    damage_page(folder)
    dataset = open_dataset(folder.root)
    assert len([dataset[index] for index in range(len(dataset))]) >= 27


def test_conversion_skips_what_only_reading_shows(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    damage_page(folder)
    done = convert_to_v30(folder.root, tmp_path / "new", skip_broken=True, codec="h264")
    assert done.num_episodes == 2


def test_a_feature_without_dtype_is_named(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    info = json.loads((folder.root / "meta/info.json").read_text())
    folder.edit_info(features={**info["features"], "odd": {"shape": [1]}})
    with pytest.raises(ValueError, match="odd"):
        open_dataset(folder.root)


def test_a_position_of_another_mixture_is_reported(caplog):
    orders = [Order(WeightedMixture([range(8), range(8)], w), 4) for w in ([3, 1], [1, 3])]
    assert orders[1].position_of(orders[0].state_dict(8)) == 8
    assert "mixture was" in caplog.text


def test_a_sequence_at_no_time_is_refused(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    with pytest.raises(ValueError, match="multiples"):
        open_dataset(folder.root, sequences={"action": [float("nan")]})


def test_a_mask_or_a_single_name_is_not_taken_for_a_list(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    with pytest.raises(TypeError, match=r"expected a list: \['observation"):
        open_dataset(folder.root, cameras=TOP)
    with pytest.raises(ValueError, match="flatnonzero"):
        open_dataset(folder.root, episodes=[True, False, True])
    assert open_dataset(folder.root, sequences={"action": np.int64(4)})[0]["action"].shape == (4, 3)


def test_the_configuration_chooses_episodes(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    config = data_config(folder.root, episodes="!1")
    assert [episode.index for episode in open_source(config, MODEL).episodes] == [0, 2]
    held_out = open_source(config, MODEL).select([2]).episodes
    assert [episode.index for episode in held_out] == [2]
    with pytest.raises(ValueError, match="Episodes 1 were asked for"):
        open_source(config, MODEL).select([0, 1])


@pytest.mark.parametrize("kind", ["null", "page"])
def test_what_the_rows_show_costs_one_episode_and_check_says_so(tmp_path, kind):
    folder = Folder(tmp_path / "set", "v2.1")
    if kind == "page":
        damage_page(folder)
    else:
        folder.rewrite(1, action=pa.array([[1.0] * 3] * 8 + [None]))
    problems = check_dataset(folder.root)
    assert [(p.severity, p.episode, p.leaves_out) for p in problems] == [("warning", 1, True)]
    assert [episode.index for episode in open_dataset(folder.root).episodes] == [0, 2]


def test_a_null_in_a_shared_file_costs_its_own_episode(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    table = pq.read_table(folder.data_path(0))
    cells = table["action"].to_pylist()
    cells[14] = None
    place = table.column_names.index("action")
    table = table.set_column(place, "action", pa.array(cells, table["action"].type))
    pq.write_table(table, folder.data_path(0))
    dataset = open_dataset(folder.root)
    assert [episode.index for episode in dataset.episodes] == [0, 2]
    np.testing.assert_allclose(dataset[12]["action"], [121, 121.1, 121.2], rtol=1e-6)


def test_nan_is_not_converted(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    action = np.zeros((folder.lengths[1], 3), np.float32)
    action[4, 1] = np.nan
    folder.rewrite(1, action=pa.array(action.tolist(), pa.list_(pa.float32())))
    with pytest.raises(ValueError, match="action is NaN or infinite in row 4"):
        convert_to_v30(folder.root, tmp_path / "new", codec="h264")
    done = convert_to_v30(folder.root, tmp_path / "new", skip_broken=True, codec="h264")
    assert list(done.skipped) == ["episode 1"]
    assert "NaN" not in (tmp_path / "new/meta/stats.json").read_text()


def test_a_task_that_would_not_be_used_is_refused(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    with pytest.raises(ValueError, match="--task 'fold' would have no effect"):
        convert_to_v30(folder.root, tmp_path / "new", task="fold")


def test_damaged_tables_of_a_set_say_which(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    tasks = folder.root / "meta/tasks.parquet"
    tasks.write_bytes(tasks.read_bytes()[:-20])
    dataset = open_dataset(folder.root)
    assert dataset[0]["task"] == "pick up the cube"
    assert usable(check_dataset(folder.root))
    episodes = folder.root / "meta/episodes/chunk-000/file-000.parquet"
    episodes.write_bytes(episodes.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"episodes/chunk-000/file-000.parquet: cannot be read"):
        open_dataset(folder.root)


@pytest.mark.parametrize("declared", ["float32", {"dtype": "float32", "shape": "three"}])
def test_a_feature_that_is_none_is_named(tmp_path, declared):
    folder = Folder(tmp_path / "set", "v2.1")
    info = json.loads((folder.root / "meta/info.json").read_text())
    folder.edit_info(features={**info["features"], "odd": declared})
    with pytest.raises(ValueError, match="odd"):
        open_dataset(folder.root)


def test_what_is_declared_and_nowhere_is_an_error(tmp_path, capsys):
    folder = Folder(tmp_path / "set", "v2.1")
    info = json.loads((folder.root / "meta/info.json").read_text())
    reward = {"dtype": "float32", "shape": [1], "names": None}
    folder.edit_info(features={**info["features"], "reward": reward})
    assert main(["data", "check", str(folder.root)]) == 1
    assert "reward" in capsys.readouterr().out
    folder.edit_info(features=info["features"])
    folder.video_path(1).unlink()
    assert main(["data", "check", str(folder.root)]) == 0
    assert f"2 of 3 episodes, cameras: {TOP}" in capsys.readouterr().out
    shutil.rmtree(folder.root / "videos")
    assert main(["data", "check", str(folder.root)]) == 1
    assert "none of them has files" in capsys.readouterr().out


def test_a_check_that_is_stopped_stops(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    seen = []

    def stop(done, _):
        seen.append(done)
        if done > sum(folder.lengths):  # among the frames
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_dataset(folder.root, progress=stop)
    assert len(seen) < 20


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 cut"])
def test_verify_names_the_file_that_it_cannot_read(tmp_path, content):
    folder = Folder(tmp_path / "set", "v2.1")
    expected = folder.root.with_name("set_expected_items.npz")
    expected.write_bytes(content)
    with pytest.raises(ValueError, match="set_expected_items.npz cannot be read"):
        list(data.replay_dataset(folder.root))
    np.savez(expected, **{"500/action": np.zeros(3)})
    with pytest.raises(ValueError, match="has only 36 frames"):
        list(data.replay_dataset(folder.root))
    np.savez(expected, action=np.zeros(3))
    with pytest.raises(ValueError, match="expected names are"):
        list(data.replay_dataset(folder.root))

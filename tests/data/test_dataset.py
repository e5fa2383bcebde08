"""Items equal those of LeRobot's own readers; those of untidy data sets are right or refused."""

import logging
import multiprocessing
import operator
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.cli import main
from piston.data import open_dataset
from piston.data.columns import decode_image
from piston.data.problems import EpisodeError

from .synthetic import FPS, Folder, decode_in_order, picture, png, write_video

TOP, WRIST = "observation.images.top", "observation.images.wrist"
VERSIONS = ("v2.0", "v2.1", "v3.0")


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, logger="piston")


@pytest.mark.parametrize("name", ["lerobot_v21", "lerobot_v30"])
def test_items_equal_those_of_lerobot_in_every_bit(small_reference, name):
    expected = np.load(small_reference / "datasets" / f"{name}_expected_items.npz")
    dataset = open_dataset(small_reference / "datasets" / name, sequences={"action": 10})
    cameras = {"top": TOP, "wrist": WRIST}
    for entry in expected.files:
        index, field = entry.split("/")
        value = dataset[int(index)][cameras.get(field, field)]
        value = np.moveaxis(value, -1, 0) if field in cameras else np.asarray(value)
        assert value.dtype == expected[entry].dtype or field == "task"
        np.testing.assert_array_equal(value, expected[entry], err_msg=entry)


@pytest.mark.parametrize("name", ["lerobot_v21", "lerobot_v30"])
def test_verify_replays_them(small_reference, name, capsys):
    folder = small_reference / "datasets" / name
    assert main(["verify", str(folder)]) == 0
    assert "all ok" in capsys.readouterr().out
    assert main(["verify", f"{folder}_expected_items.npz"]) == 0


def test_verify_reports_a_wrong_frame(small_reference, tmp_path, capsys):
    source = small_reference / "datasets" / "lerobot_v21"
    shutil.copytree(source, tmp_path / "lerobot_v21")
    shutil.copy(f"{source}_expected_items.npz", tmp_path)
    videos = tmp_path / "lerobot_v21/videos/chunk-000"
    shutil.copy(videos / WRIST / "episode_000001.mp4", videos / TOP / "episode_000001.mp4")
    assert main(["verify", str(tmp_path / "lerobot_v21")]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(wrong) == 1
    assert "top" in wrong[0]


def test_a_public_set_with_a_phantom_camera_is_read(reference, capsys):
    path = reference / "datasets" / "gr00t_robot_sim_PickNPlace"
    dataset = open_dataset(path, sequences={"action": 16})
    assert (len(dataset), dataset.cameras) == (2096, ("observation.images.ego_view",))
    item = dataset[2095]
    assert item["observation.images.ego_view"].shape == (256, 256, 3)
    assert item["action"].shape == (16, 44)
    assert item["action_is_pad"].tolist() == [False] + [True] * 15
    assert item["frame_index"] == 327  # the files have no such column
    assert main(["verify", str(path)]) == 0
    assert "by seeking and in order" in capsys.readouterr().out


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["video", "image"])
def test_every_item_has_its_own_row_and_frame(tmp_path, version, kind):
    folder = Folder(tmp_path / "set", version, cameras={TOP: kind, WRIST: kind})
    dataset = open_dataset(folder.root)
    assert len(dataset) == 36
    np.testing.assert_array_equal(dataset.episode_bounds, [[0, 12], [12, 21], [21, 36]])
    for index in np.random.default_rng(0).permutation(36):
        item = dataset[int(index)]
        episode = int(np.searchsorted([12, 21, 36], index, side="right"))
        assert (item["index"], item["episode_index"]) == (index, episode)
        assert item["observation.state"].tolist() == pytest.approx(
            [index, index + 0.1, index + 0.2]
        )
        assert item["task"] == folder.tasks[episode % 2]
        unlike = [np.abs(item[TOP].astype(int) - picture(k)).mean() for k in range(36)]
        assert np.argmin(unlike) == index
        assert min(unlike) < (6 if kind == "video" else 1e-9)


@pytest.mark.parametrize("codec", ["h264", "av1", "mpeg4"])
def test_frames_equal_those_decoded_in_order(tmp_path, codec):
    folder = Folder(tmp_path / "set", "v3.0", codec=codec)
    dataset, in_order = open_dataset(folder.root), decode_in_order(folder.video_path(0))
    for index in (35, 0, 20, 21, 12, 11, 34, 1, 2):
        np.testing.assert_array_equal(dataset.frame(index)[TOP], in_order[index])


def test_sequences_repeat_the_ends_of_an_episode_and_say_so(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    seconds = [-2 / FPS, 0.0, 1 / FPS]
    sequences = {"action": 4, "observation.state": seconds, TOP: seconds}
    dataset = open_dataset(folder.root, sequences=sequences)
    item = dataset[19]  # the last but one of episode 1
    assert item["action"][:, 0].tolist() == [119, 120, 120, 120]
    assert item["action_is_pad"].tolist() == [False, False, True, True]
    item = dataset[12]  # its first
    assert item["observation.state"][:, 0].tolist() == [12, 12, 13]
    assert item["observation.state_is_pad"].tolist() == [True, False, False]
    in_order = decode_in_order(folder.video_path(0))
    np.testing.assert_array_equal(item[TOP], np.stack([in_order[k] for k in (12, 12, 13)]))
    assert item[f"{TOP}_is_pad"].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("sequences", "error"),
    [
        ({"action": [0.0, 0.05]}, r"multiples of 0\.1 s"),
        ({"action": 0}, "at least 1"),
        ({"action": []}, "multiples"),
        ({"actoin": 3}, "Did you mean 'action'"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused(tmp_path, sequences, error):
    folder = Folder(tmp_path / "set", lengths=(4,), cameras={})
    with pytest.raises((ValueError, KeyError), match=error):
        open_dataset(folder.root, sequences=sequences)


def test_columns_come_whole_and_cannot_be_changed_by_accident(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    shutil.rmtree(folder.root / "videos")
    dataset = open_dataset(folder.root, cameras=())
    assert dataset.cameras == ()
    state = dataset.column("observation.state")
    assert (state.shape, state.dtype) == ((36, 3), np.float32)
    assert state[:, 0].tolist() == list(range(36))
    with pytest.raises(ValueError, match="read-only"):
        state[0] = 1
    dataset[5]["observation.state"][:] = -1
    assert dataset[5]["observation.state"][0] == 5
    with pytest.raises(KeyError, match="has no 'nothing'"):
        dataset.column("nothing")


def test_subsets_number_their_own_frames(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    dataset = open_dataset(folder.root, episodes=[2, 0])
    assert len(dataset) == 27
    assert [episode.index for episode in dataset.episodes] == [0, 2]
    assert dataset[12]["index"] == 21
    assert dataset[-1]["index"] == 35
    in_order = decode_in_order(folder.video_path(0))
    np.testing.assert_array_equal(dataset[12][TOP], in_order[21])
    with pytest.raises(IndexError):
        dataset[27]


def test_cameras_are_chosen_or_refused_by_name(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    assert open_dataset(folder.root, cameras=[WRIST]).cameras == (WRIST,)
    item = open_dataset(folder.root, cameras=())[0]
    assert TOP not in item
    assert WRIST not in item
    with pytest.raises(KeyError, match="Did you mean"):
        open_dataset(folder.root, cameras=["observation.images.wirst"])
    with pytest.raises(KeyError, match="The open data set .* has no .*wrist"):
        open_dataset(folder.root, cameras=[TOP]).frame(0, [WRIST])


def _cut(path, keep=0.6):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def _missing_video(folder):
    folder.video_path(1).unlink()


def _cut_video(folder):
    _cut(folder.video_path(1))


def _empty_video(folder):
    folder.video_path(1).write_bytes(b"")


def _short_video(folder):
    write_video(folder.video_path(1), folder.pictures(1)[:-2])


def _missing_data(folder):
    folder.data_path(1).unlink()


def _cut_data(folder):
    _cut(folder.data_path(1))


def _short_data(folder):
    table = pq.read_table(folder.data_path(1))
    pq.write_table(table.slice(0, 5), folder.data_path(1))


def _lacks_a_column(folder):
    folder.rewrite(1, action=None)


@pytest.mark.parametrize(
    "damage",
    [
        _missing_video,
        _cut_video,
        _empty_video,
        _short_video,
        _missing_data,
        _cut_data,
        _short_data,
        _lacks_a_column,
    ],
)
def test_a_damaged_episode_is_left_out_when_the_set_is_opened(tmp_path, caplog, damage):
    folder = Folder(tmp_path / "set")
    damage(folder)
    dataset = open_dataset(folder.root)
    assert [episode.index for episode in dataset.episodes] == [0, 2]
    assert "1 of 3 episodes are left out" in caplog.text
    assert "episode 1" in caplog.text
    items = [dataset[index] for index in range(len(dataset))]
    assert [item["index"] for item in items] == [*range(12), *range(21, 36)]
    expected = decode_in_order(folder.video_path(2))
    np.testing.assert_array_equal(items[-1][TOP], expected[-1])


def test_without_the_damaged_camera_the_episode_counts(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    folder.video_path(1, WRIST).unlink()
    assert len(open_dataset(folder.root)) == 27
    assert len(open_dataset(folder.root, cameras=[TOP])) == 36


def test_a_cut_file_of_v3_costs_the_cameras_or_rows_in_it(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0", cameras={TOP: "video", WRIST: "video"})
    _cut(folder.video_path(0, WRIST))
    with pytest.raises(ValueError, match=r"No episode.*is cut: "):
        open_dataset(folder.root)
    assert len(open_dataset(folder.root, cameras=[TOP])) == 36


def test_the_end_of_a_v3_video_that_is_missing_costs_the_last_episode(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    pictures = [image for episode in range(3) for image in folder.pictures(episode)]
    write_video(folder.video_path(0), pictures[:-3])
    dataset = open_dataset(folder.root)
    assert [episode.index for episode in dataset.episodes] == [0, 1]


def test_rows_of_v3_are_found_by_their_episode(tmp_path):
    """A recorder that was killed leaves rows of an episode that was never listed."""
    folder = Folder(tmp_path / "set", "v3.0")
    folder.write_episodes([folder.episode_row(episode) for episode in (0, 2)])
    dataset = open_dataset(folder.root)
    assert dataset.column("index").tolist() == [*range(12), *range(21, 36)]


def test_derived_columns_are_computed_where_they_are_missing(tmp_path):
    folder = Folder(tmp_path / "set")
    gone = dict.fromkeys(("index", "task_index", "frame_index", "timestamp", "episode_index"))
    for episode in range(3):
        folder.rewrite(episode, **gone)
    dataset = open_dataset(folder.root)
    item = dataset[13]
    assert (item["index"], item["frame_index"], item["episode_index"]) == (13, 1, 1)
    assert (item["task_index"], item["task"]) == (1, "open the drawer")
    assert item["timestamp"] == pytest.approx(1 / FPS)


def test_a_derived_column_that_one_file_lacks_is_computed_for_all(tmp_path):
    folder = Folder(tmp_path / "set")
    for episode, length in ((0, 12), (1, 9)):  # as lists of one value, of another type
        folder.rewrite(episode, timestamp=pa.array([["?"]] * length))
    folder.rewrite(2, timestamp=None)
    timestamps = open_dataset(folder.root).column("timestamp")
    expected = np.concatenate([np.arange(length) / FPS for length in (12, 9, 15)])
    np.testing.assert_allclose(timestamps, expected, rtol=1e-6)


def test_without_a_list_of_tasks_the_episode_says_what_to_do(tmp_path):
    folder = Folder(tmp_path / "set")
    (folder.root / "meta/tasks.jsonl").unlink()
    assert open_dataset(folder.root)[13]["task"] == "open the drawer"


def test_frames_follow_the_rows_when_the_clock_began_late(tmp_path):
    folder = Folder(tmp_path / "set")
    late = pa.array((np.arange(9) + 1) / FPS)
    folder.rewrite(1, timestamp=late)
    np.testing.assert_array_equal(
        open_dataset(folder.root)[12][TOP], decode_in_order(folder.video_path(1))[0]
    )


def test_a_video_whose_frames_are_elsewhere_is_refused_not_guessed(tmp_path):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(1), folder.pictures(1), gap=1)
    dataset = open_dataset(folder.root)
    dataset[12]  # at 0 s there is a frame
    with pytest.raises(
        EpisodeError, match=r"episode 1, frame 1, .*top: .*episode_000001\.mp4: no fra"
    ):
        dataset[13]
    dataset[21]


def test_a_picture_that_is_damaged_names_its_place(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "image"})
    cells = folder.columns(1)[TOP].to_pylist()
    cells[4]["bytes"] = cells[4]["bytes"][:50]
    cells[5] = {"bytes": None, "path": None}
    folder.rewrite(1, **{TOP: pa.array(cells)})
    dataset = open_dataset(folder.root)
    dataset[15]
    with pytest.raises(ValueError, match="episode 1, frame 4, .*cannot be decoded"):
        dataset[16]
    with pytest.raises(ValueError, match="episode 1, frame 5, .*has no image"):
        dataset[17]


def test_pictures_may_lie_beside_the_table(tmp_path):
    folder = Folder(tmp_path / "set", lengths=(3,), cameras={TOP: "image"})
    cells = folder.columns(0)[TOP].to_pylist()
    (folder.root / "images").mkdir()
    (folder.root / "images/1.png").write_bytes(cells[1]["bytes"])
    cells[1] = {"bytes": None, "path": "images/1.png"}
    folder.rewrite(0, **{TOP: pa.array(cells)})
    np.testing.assert_array_equal(open_dataset(folder.root)[1][TOP], picture(1))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1.0, 2.0, 3.0]] * 8 + [None]), "without a value"),
        (pa.array([[1.0, 2.0, 3.0]] * 8 + [[1.0]]), "different lengths"),
    ],
)
def test_a_column_that_is_no_array_costs_its_episode(tmp_path, column, message, caplog):
    folder = Folder(tmp_path / "set")
    folder.rewrite(1, action=column)
    dataset = open_dataset(folder.root)
    assert [episode.index for episode in dataset.episodes] == [0, 2]
    assert message in caplog.text
    assert dataset[len(dataset) - 1]["action"].shape == (3,)


@pytest.mark.parametrize(
    ("column", "message"), [(pa.array([[1.0, 2.0]] * 9), "in the files before")]
)
def test_a_column_of_another_shape_is_refused_when_the_set_is_opened(tmp_path, column, message):
    folder = Folder(tmp_path / "set")
    folder.rewrite(1, action=column)
    with pytest.raises(EpisodeError, match=f"episode_000001.*{message}") as found:
        open_dataset(folder.root)
    assert found.value.episode == 1
    assert len(open_dataset(folder.root, episodes="!1").episodes) == 2


def test_arrays_of_more_axes_and_texts_are_read(tmp_path):
    folder = Folder(tmp_path / "set", lengths=(4,), cameras={})
    grid = np.arange(24).reshape(4, 2, 3)
    nested, flat = pa.array(grid.tolist()), pa.array(grid.reshape(4, 6).tolist())
    folder.rewrite(0, nested=nested, flat=flat, words=pa.array(list("abcd")))
    features = {
        "nested": {"dtype": "int64", "shape": [2, 3]},
        "flat": {"dtype": "int64", "shape": [2, 3]},
        "words": {"dtype": "string", "shape": [1]},
    }
    folder.edit_info(features=features)
    item = open_dataset(folder.root)[2]
    np.testing.assert_array_equal(item["nested"], grid[2])
    np.testing.assert_array_equal(item["flat"], grid[2])
    assert item["words"] == "c"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(tmp_path, method):
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    dataset = open_dataset(folder.root)
    expected = dataset[13]  # decoders and threads are in use before the fork
    with multiprocessing.get_context(method).Pool(1) as pool:
        item = pool.apply_async(operator.getitem, (dataset, 13)).get(timeout=60)
    for camera in (TOP, WRIST):
        np.testing.assert_array_equal(item[camera], expected[camera])


def test_a_fork_in_the_middle_of_reading_goes_on_alone(tmp_path):
    """The child gets the parent's object as it is, not a pickled copy."""
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    dataset = open_dataset(folder.root)
    expected = dataset[13][WRIST]
    dataset[12]
    child = os.fork()
    if child == 0:  # no assertion may escape into the forked test run
        try:
            os._exit(0 if np.array_equal(dataset[13][WRIST], expected) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(dataset[13][WRIST], expected)


def test_a_pickled_set_is_small_and_equal(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    dataset = open_dataset(folder.root, sequences={"action": 5})
    before = dataset[20]
    data = pickle.dumps(dataset)
    assert len(data) < 20_000
    after = pickle.loads(data)[20]
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key])


def test_threads_share_a_set(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0", cameras={TOP: "video", WRIST: "image"})
    dataset, in_order = open_dataset(folder.root), decode_in_order(folder.video_path(0))
    indices = np.random.default_rng(1).integers(0, 36, 80).tolist()
    with ThreadPoolExecutor(4) as pool:
        for index, item in zip(indices, pool.map(dataset.__getitem__, indices)):
            np.testing.assert_array_equal(item[TOP], in_order[index])
            np.testing.assert_array_equal(item[WRIST], picture(index))


def test_closing_closes_the_files(tmp_path):
    opened = Path("/proc/self/fd")
    if not opened.is_dir():
        pytest.skip("needs /proc to count open files")
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    dataset = open_dataset(folder.root)
    dataset[0]
    before = len(list(opened.iterdir()))
    dataset.close()
    assert len(list(opened.iterdir())) <= before - 2
    assert dataset[0]["index"] == 0


def test_no_changed_byte_of_a_png_gives_another_picture(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    data = png(noise)["bytes"]
    np.testing.assert_array_equal(decode_image(data, tmp_path), noise)
    errors = 0
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]
        try:
            np.testing.assert_array_equal(decode_image(changed, tmp_path), noise)
        except ValueError:
            errors += 1
    assert errors > len(data) - 16  # the end of the file says nothing about the picture

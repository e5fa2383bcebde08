"""`check_dataset` reports everything that is wrong, with the episode and the consequence."""

import numpy as np
import pyarrow as pa
import pytest

from piston.cli import main
from piston.data import check_dataset, open_dataset
from piston.data.check import usable

from .synthetic import FPS, Folder, picture, write_video

TOP = "observation.images.top"


def _found(folder, severity=None):
    return [
        f"{problem.where}: {problem.what}"
        for problem in check_dataset(folder.root)
        if severity in (None, problem.severity)
    ]


def _one(folder, severity, *parts):
    """Exactly one problem of this severity, which says all of this."""
    found = _found(folder, severity)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_tidy_set_has_no_problems(tmp_path, version, kind):
    assert _found(Folder(tmp_path / "set", version, cameras={TOP: kind})) == []


@pytest.mark.parametrize("name", ["lerobot_v21", "lerobot_v30"])
def test_the_reference_sets_have_no_problems(small_reference, name, capsys):
    assert check_dataset(small_reference / "datasets" / name) == []
    assert main(["data", "check", str(small_reference / "datasets" / name)]) == 0
    assert "training can use it" in capsys.readouterr().out


def test_the_phantom_camera_is_reported_and_the_set_is_usable(reference, capsys):
    path = reference / "datasets" / "gr00t_robot_sim_PickNPlace"
    assert main(["data", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "observation.images.egoview" in out
    assert "the camera is ignored" in out


def test_black_frames_are_reported_by_number(tmp_path):
    folder = Folder(tmp_path / "set")
    pictures = [picture(k, black=k in (2, 3, 4, 8)) for k in range(9)]
    write_video(folder.video_path(1), pictures)
    _one(folder, "warning", f"episode 1, {TOP}", "4 of 9 frames are black: 2–4, 8")


def test_a_codec_unlike_the_declared_one_is_read_and_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(2), folder.pictures(2), codec="mpeg4")
    _one(folder, "note", "episode_000002.mp4", "the codec is mpeg4, declared is h264")
    open_dataset(folder.root)[30]


def test_another_size_than_declared_is_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    info = {"dtype": "video", "shape": [480, 640, 3], "names": None}
    features = open_dataset(folder.root).metadata.info["features"]
    folder.edit_info(features={**features, TOP: info})
    warnings = _found(folder, "warning")
    assert len(warnings) == 3
    assert "frames are 64×64, declared is (480, 640, 3)" in warnings[0]


def test_frames_at_other_times_stop_training(tmp_path, capsys):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(1), folder.pictures(1), gap=1)
    _one(folder, "error", f"episode 1, {TOP}", "frame 1", "no frame at 0.1")
    assert main(["data", "check", str(folder.root)]) == 1
    assert "training cannot use it" in capsys.readouterr().out
    assert "--data.episodes" in check_dataset(folder.root)[0].consequence
    without = open_dataset(folder.root, episodes="0,2")
    assert len([without[index] for index in range(len(without))]) == 27


def test_a_damaged_picture_stops_training(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "image"})
    cells = folder.columns(1)[TOP].to_pylist()
    cells[4]["bytes"] = b"no picture"
    folder.rewrite(1, **{TOP: pa.array(cells)})
    _one(folder, "error", f"episode 1, {TOP}", "frame 4", "cannot be decoded")


@pytest.mark.parametrize("part", ["data", "video"])
def test_a_cut_file_costs_one_episode_and_the_set_stays_usable(tmp_path, part):
    folder = Folder(tmp_path / "set")
    path = folder.data_path(1) if part == "data" else folder.video_path(1)
    path.write_bytes(path.read_bytes()[:-300])
    problems = check_dataset(folder.root)
    assert [(p.episode, p.leaves_out) for p in problems] == [(1, True)]
    assert usable(problems)


def test_a_set_without_a_readable_episode_is_not_usable(tmp_path):
    folder = Folder(tmp_path / "set")
    for episode in range(3):
        folder.video_path(episode).write_bytes(b"")
    _one(folder, "error", "no episode can be read")


@pytest.mark.parametrize(
    ("changes", "severity", "what"),
    [
        ({"timestamp": pa.array((np.arange(9) + 1) / FPS)}, "note", "clock begins at 0.1 s"),
        ({"timestamp": pa.array(np.arange(9) / 12)}, "warning", "differ from 10 fps by up to 0.13"),
        ({"task_index": pa.array([7] * 9)}, "warning", "task_index [7] is not in the list"),
        ({"episode_index": pa.array([0] * 9)}, "warning", "rows say that they are of episode 0"),
        ({"frame_index": pa.array([5] * 9)}, "note", "frame_index does not count up from 0"),
        ({"index": pa.array(range(9))}, "note", "index does not count up from 12"),
        ({"index": None}, "note", "not in every data file"),
        ({"task_index": None}, "note", "not in every data file"),
        ({"action": None}, "warning", "its data file has no column 'action'"),
        (
            {"action": pa.array([[1.0, np.nan, 0.0]] * 9)},
            "error",
            "action is NaN or infinite in 9 rows",
        ),
        ({"action": pa.array([[1.0, 2.0]] * 9)}, "error", "action is float64[2], in other files"),
        ({"action": pa.array([[1.0] * 3] * 8 + [None])}, "warning", "without a value"),
    ],
)
def test_rows_are_checked(tmp_path, changes, severity, what):
    folder = Folder(tmp_path / "set")
    folder.rewrite(1, **changes)
    _one(folder, severity, what)
    assert len(_found(folder)) == 1


def test_a_shape_unlike_the_declared_one_is_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    features = open_dataset(folder.root).metadata.info["features"]
    features["action"]["shape"] = [7]
    folder.edit_info(features=features)
    _one(folder, "warning", "action is float32[3], declared is [7]")


def test_sensors_that_stand_still_are_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    for episode, length in enumerate(folder.lengths):
        state = np.random.default_rng(episode).random((length, 3))
        state[:, 1] = 0.5
        if episode == 1:
            state[:] = state[0]
        folder.rewrite(episode, observation__state=pa.array(state.tolist()))
    _one(folder, "note", "observation.state (y): never changes in the set")
    _one(folder, "warning", "episode 1: observation.state does not change in the whole episode")
    assert len(_found(folder)) == 2


def test_files_that_nothing_refers_to_are_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(0, "observation.images.side"), folder.pictures(0))
    _one(folder, "note", "observation.images.side", "1 files that no listed episode")


def test_more_frames_than_rows_are_reported(tmp_path):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(1), folder.pictures(1) * 2)
    _one(folder, "note", "18 frames, the episodes have 9")


def test_two_episodes_cannot_have_the_same_frames(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    rows = [folder.episode_row(episode) for episode in range(3)]
    rows[2][f"videos/{TOP}/from_timestamp"] -= 3 / FPS
    folder.write_episodes(rows)
    problems = check_dataset(folder.root)
    assert [(p.episode, p.camera) for p in problems if p.leaves_out] == [(1, TOP), (2, TOP)]
    assert [episode.index for episode in open_dataset(folder.root).episodes] == [0]


def test_a_video_at_another_rate_is_left_out(tmp_path):
    folder = Folder(tmp_path / "set")
    write_video(folder.video_path(1), folder.pictures(1), fps=FPS + 2)
    _one(folder, "warning", f"episode 1, {TOP}", "has 12 frames per second, declared are 10")
    assert [episode.index for episode in open_dataset(folder.root).episodes] == [0, 2]


def test_what_the_check_passes_is_read_to_the_end(tmp_path):
    """The promise: reading does not stop on what the check would have found."""
    folder = Folder(tmp_path / "set", lengths=(6, 5, 7, 4))
    folder.video_path(0).unlink()
    write_video(folder.video_path(1), folder.pictures(1), codec="av1")
    folder.rewrite(2, index=None, task_index=None)
    (folder.root / "videos").rename(folder.root / "video")
    problems = check_dataset(folder.root)
    assert usable(problems)
    left_out = {problem.episode for problem in problems if problem.leaves_out}
    dataset = open_dataset(folder.root)
    assert {episode.index for episode in dataset.episodes} == {0, 1, 2, 3} - left_out
    assert [dataset[index]["index"] for index in range(len(dataset))] == list(range(6, 22))


def test_progress_counts_up_to_the_whole(tmp_path):
    folder = Folder(tmp_path / "set", lengths=(5, 4))
    seen = []
    check_dataset(folder.root, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (18, 18)  # nine rows and nine frames
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_info_shows_what_a_set_contains(small_reference, capsys):
    assert main(["data", "info", str(small_reference / "datasets" / "lerobot_v30")]) == 0
    out = capsys.readouterr().out
    assert "3 episodes, 71 frames, 25 fps" in out
    assert "Open the drawer" in out


def test_the_command_lists_its_subcommands(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data"])
    assert stop.value.code == 0
    assert "check" in capsys.readouterr().out
    assert main(["data", "chek", "x"]) == 2
    assert "Did you mean 'check'?" in capsys.readouterr().err
    assert main(["data", "check", "no/such/folder/here"]) == 1
    assert "There is no data set" in capsys.readouterr().err

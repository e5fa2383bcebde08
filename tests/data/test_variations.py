"""Data sets as other writers make them: known variations are read, with one warning each."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.cli import main
from piston.data import check_dataset, open_dataset
from piston.data.check import usable
from piston.data.metadata import Metadata
from piston.data.pipeline import open_source
from piston.logs import forget_warnings
from piston.transforms import Group, RepackTransform

from .pipelines import MODEL, data_config
from .synthetic import FPS, Folder, write_video

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(autouse=True)
def _warn_again():
    forget_warnings()


def _move_videos(folder, template, info=True):
    """Move the videos to where another template says, in each episode's file of its own."""
    shutil.move(folder.root / "videos", folder.root / "old")
    for episode in range(len(folder.lengths)):
        for camera in folder.cameras:
            source = folder.video_path(episode, camera)
            source = folder.root / "old" / source.relative_to(folder.root / "videos")
            fields = {"video_key": camera, "episode_chunk": 0, "chunk_index": 0, "file_index": 0}
            target = folder.root / template.format(episode_index=episode, **fields)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    shutil.rmtree(folder.root / "old")
    if info:
        folder.edit_info(video_path=template)


def _set_rows(folder, change):
    rows = [folder.episode_row(episode) for episode in range(len(folder.lengths))]
    for row in rows:
        change(row)
    folder.write_episodes(rows)


def _read_like(folder, tidy):
    """The set gives the same items as a tidy one, frames included."""
    found, expected = open_dataset(folder.root), open_dataset(tidy.root)
    assert len(found) == len(expected) == sum(tidy.lengths)
    for index in (0, 11, 12, 20, len(found) - 1):
        for key, value in expected[index].items():
            np.testing.assert_array_equal(found[index][key], value)
    return found


def _ends_at_the_last_frame(row):
    for key in row:
        if key.endswith("/to_timestamp"):
            row[key] -= 1 / FPS


@pytest.mark.parametrize("declared", ["videos", "video"])
def test_a_v3_set_that_ends_at_the_last_frame_and_has_a_folder_named_video(
    tmp_path, caplog, declared
):
    cameras = {TOP: "video", WRIST: "video"}
    tidy = Folder(tmp_path / "tidy", "v3.0", cameras=cameras)
    folder = Folder(tmp_path / "set", "v3.0", cameras=cameras)
    _set_rows(folder, _ends_at_the_last_frame)
    (folder.root / "videos").rename(folder.root / "video")
    file = "{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    folder.edit_info(video_path=f"{declared}/{file}")
    assert _read_like(folder, tidy).cameras == (TOP, WRIST)
    warnings = [record.message for record in caplog.records]
    assert sum("6 spans of videos are declared too short" in text for text in warnings) == 1
    assert sum("no file videos/" in text for text in warnings) == (declared == "videos")
    assert len(warnings) == (2 if declared == "videos" else 1)
    problems = check_dataset(folder.root)
    assert usable(problems)
    assert len(problems) == len(warnings)
    assert not any(problem.leaves_out for problem in problems)


def test_an_early_end_is_judged_by_the_frames_of_the_video(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    key = f"videos/{TOP}/to_timestamp"
    rows = [folder.episode_row(episode) for episode in range(3)]
    rows[1][key] -= 2 / FPS  # the next episode begins after its 9 frames all the same
    rows[2][key] -= 5 / FPS  # the file ends after its 15 frames
    folder.write_episodes(rows)
    _read_like(folder, Folder(tmp_path / "tidy", "v3.0"))
    folder.write_episodes(rows[:2])  # whose are the frames after the 7 of episode 1?
    [problem] = [one for one in check_dataset(folder.root) if one.leaves_out]
    assert (problem.episode, problem.camera) == (1, TOP)
    assert "9 rows, but its video spans 7.0 frames" in problem.what


@pytest.mark.parametrize(
    "template",
    [
        "videos/chunk-{chunk_index:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "videos/{video_key}/chunk-{chunk_index:03d}/episode_{episode_index:06d}.mp4",
        "videos/{video_key}/{episode_index}.mp4",
    ],
)
def test_a_v2_set_with_the_chunk_of_v3_in_its_templates(tmp_path, template, caplog):
    folder = Folder(tmp_path / "set", "v2.1")
    _move_videos(folder, template)
    folder.edit_info(data_path="data/chunk-{chunk_index:03d}/episode_{episode_index:06d}.parquet")
    _read_like(folder, Folder(tmp_path / "tidy", "v2.1"))
    assert not caplog.records
    assert check_dataset(folder.root) == []


def test_a_v3_set_with_a_video_for_each_episode(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    shutil.rmtree(folder.root / "videos")
    template = "videos/{video_key}/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.mp4"
    folder.edit_info(video_path=template)
    for episode in range(3):
        fields = {"video_key": TOP, "episode_chunk": 0, "episode_index": episode}
        write_video(folder.root / template.format(**fields), folder.pictures(episode))

    def one_file_each(row):
        row[f"videos/{TOP}/from_timestamp"] = 0.0
        row[f"videos/{TOP}/to_timestamp"] = (row["length"] - 1) / FPS
        del row[f"videos/{TOP}/chunk_index"], row[f"videos/{TOP}/file_index"]

    _set_rows(folder, one_file_each)
    dataset = open_dataset(folder.root)
    pictures = folder.pictures(1)
    assert np.abs(dataset[14][TOP].astype(int) - pictures[2].astype(int)).mean() < 4


def test_files_in_the_usual_place_are_found_whatever_the_template_says(tmp_path, caplog):
    folder = Folder(tmp_path / "set", "v2.1")
    folder.edit_info(video_path="videos/{video_key}/{episode_index}.mp4")
    _read_like(folder, Folder(tmp_path / "tidy", "v2.1"))
    assert len(caplog.records) == 1
    assert f"no file videos/{TOP}/0.mp4, but videos/chunk-000/" in caplog.text


@pytest.mark.parametrize(("declared", "layout"), [("v3.0", "v2.1"), ("v2.1", "v3.0")])
def test_the_list_of_episodes_tells_the_version(tmp_path, caplog, declared, layout):
    folder = Folder(tmp_path / "set", layout)
    folder.edit_info(codebase_version=declared)
    _read_like(folder, Folder(tmp_path / "tidy", layout))
    assert f"codebase_version is {declared}" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_tasks_in_the_file_of_the_other_version(tmp_path, caplog, version):
    folder = Folder(tmp_path / "set", version)
    meta = folder.root / "meta"
    if version == "v3.0":
        (meta / "tasks.parquet").unlink()
        rows = [{"task_index": i, "task": task} for i, task in enumerate(folder.tasks)]
        (meta / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        (meta / "tasks.jsonl").unlink()
        table = pa.table({"task_index": [0, 1], "task": folder.tasks})
        pq.write_table(table, meta / "tasks.parquet")
    assert open_dataset(folder.root).metadata.tasks == dict(enumerate(folder.tasks))
    [record] = caplog.records
    assert "is missing, but meta/tasks." in record.message


def test_whole_numbers_with_a_decimal_point_are_whole_numbers(tmp_path, caplog):
    folder = Folder(tmp_path / "set", "v2.1")
    path = folder.root / "meta/episodes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {key: float(row[key]) for key in ("episode_index", "length")}
    path.write_text("\n".join(map(json.dumps, rows)))
    _read_like(folder, Folder(tmp_path / "tidy", "v2.1"))
    assert not caplog.records


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_camera_declared_as_image_and_stored_as_video(tmp_path, caplog, version):
    folder = Folder(tmp_path / "set", version)
    features = json.loads((folder.root / "meta/info.json").read_text())["features"]
    features[TOP]["dtype"] = "image"
    folder.edit_info(features=features)
    _read_like(folder, Folder(tmp_path / "tidy", version))
    assert len(caplog.records) == 1
    assert "declared as image, but its frames are in videos" in caplog.text
    assert usable(check_dataset(folder.root))


def test_fields_of_info_that_are_written_in_other_ways(tmp_path, caplog):
    folder = Folder(tmp_path / "set", "v2.1")
    info = json.loads((folder.root / "meta/info.json").read_text())
    features = info["features"]
    features["action"]["names"] = {"motors": ["x", "y", "z"]}
    features["observation.state"]["names"] = None
    features["instruction"] = {"dtype": "string", "shape": [1], "names": None}
    for episode, length in enumerate(folder.lengths):
        folder.rewrite(
            episode, instruction=pa.array(["go on"] * length), undeclared=pa.nulls(length)
        )
    for key in ("total_tasks", "chunks_size"):
        del info[key]
    (folder.root / "meta/info.json").write_text(json.dumps(info))
    folder.edit_info(codebase_version="2.1", fps=float(FPS), features=features)
    dataset = open_dataset(folder.root)
    assert dataset[0]["instruction"] == "go on"
    assert dataset[30][TOP].shape == (64, 64, 3)
    assert check_dataset(folder.root) == []
    assert not caplog.records


def test_a_clock_that_cannot_be_read_is_computed(tmp_path):
    folder = Folder(tmp_path / "set", "v2.1")
    for episode, length in enumerate(folder.lengths):
        folder.rewrite(episode, timestamp=pa.nulls(length, pa.float32()))
    _read_like(folder, Folder(tmp_path / "tidy", "v2.1"))
    [problem] = check_dataset(folder.root)
    assert (problem.severity, problem.where) == ("note", "timestamp")
    assert "timestamp has no value in row 0" in problem.what


RAGGED = {"dtype": "float32", "shape": [4], "names": None}
TEXTS = {"dtype": "string", "shape": [1], "names": None}


@pytest.mark.parametrize(
    ("feature", "make", "expected"),
    [
        (RAGGED, lambda n: pa.array([[1.0] * (i % 3) for i in range(n)]), "different lengths"),
        (RAGGED, lambda n: pa.nulls(n, pa.float32()), "has no value in row 0"),
        (TEXTS, lambda n: pa.array(["go", None] * n)[:n], None),
        (TEXTS, lambda n: pa.array([[{"text": "go"}] * (i % 2) for i in range(n)]), None),
    ],
    ids=["lists of any length", "nulls", "texts with nulls", "lists of structures"],
)
def test_an_extra_column_does_not_cost_the_set(tmp_path, caplog, feature, make, expected):
    folder = Folder(tmp_path / "set", "v2.1")
    features = json.loads((folder.root / "meta/info.json").read_text())["features"]
    folder.edit_info(features={**features, "extra": feature})
    for episode, length in enumerate(folder.lengths):
        folder.rewrite(episode, extra=make(length))
    dataset = open_dataset(folder.root)
    assert len(dataset) == sum(folder.lengths)
    assert ("extra" in dataset[0]) == (expected is None)
    problems = check_dataset(folder.root)
    assert usable(problems)
    assert len(problems) == len(caplog.records) == (expected is not None)
    if expected is not None:
        assert expected in caplog.text
        with pytest.raises(KeyError, match="has no 'extra'"):
            open_dataset(folder.root, sequences={"extra": 2})


def test_a_set_is_not_opened_silently_without_its_cameras(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0", cameras={TOP: "video", WRIST: "video"})
    file = folder.video_path(0, WRIST).relative_to(folder.root)
    shutil.rmtree((folder.root / file).parent)
    assert open_dataset(folder.root).cameras == (TOP,)  # with a warning, see below
    with pytest.raises(FileNotFoundError, match=f"no frames of {WRIST}.*{file} is missing"):
        open_dataset(folder.root, cameras=[WRIST])
    shutil.rmtree(folder.root / "videos")
    with pytest.raises(FileNotFoundError, match=f"no camera has frames.*{TOP}.* is missing"):
        open_dataset(folder.root)
    assert len(open_dataset(folder.root, cameras=())) == sum(folder.lengths)


def test_a_camera_without_files_is_one_warning(tmp_path, caplog):
    folder = Folder(tmp_path / "set", "v2.1", cameras={TOP: "video", WRIST: "video"})
    shutil.rmtree(folder.video_path(0, WRIST).parent)
    for _ in range(2):
        open_dataset(folder.root)
        open_dataset(folder.root, cameras=[TOP])
    [record] = caplog.records
    assert f"videos/chunk-000/{WRIST}/episode_000000.mp4 is missing" in record.message
    assert "the camera is ignored" in record.message


def test_a_missing_video_is_named(tmp_path, caplog):
    folder = Folder(tmp_path / "set", "v2.1")
    for episode in (0, 2):
        folder.video_path(episode).unlink()
    assert [episode.index for episode in open_dataset(folder.root).episodes] == [1]
    assert f"2 episodes: 0, 2; {TOP}: e.g. videos/chunk-000/" in caplog.text
    assert "episode_000000.mp4 is missing" in caplog.text


def test_an_episode_without_a_place_in_a_video_says_so(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    rows = [folder.episode_row(episode) for episode in range(3)]
    rows[1][f"videos/{TOP}/chunk_index"] = None
    folder.write_episodes(rows)
    [problem] = Metadata.read(folder.root).problems
    assert (problem.episode, problem.leaves_out) == (1, True)
    assert "does not say where its frames are" in problem.what


def test_the_check_has_one_row_for_each_kind_of_problem(tmp_path, capsys, monkeypatch):
    folder = Folder(tmp_path / "set", "v2.1", lengths=(6,) * 12, cameras={TOP: "video"})
    for episode in range(12):
        pictures = folder.pictures(episode)
        if episode < 5:
            write_video(folder.video_path(episode), pictures[: episode + 1])  # too few frames
        elif episode % 2:
            folder.rewrite(episode, timestamp=pa.array((np.arange(6) + episode) / FPS))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["data", "check", str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert "1 warning, 1 note: training can use it" in " ".join(out.split())
    assert f"5 episodes: 0–4; {TOP}" in out
    assert "has 1 frames, 6 are needed" in out
    assert "4 episodes: 5, 7, 9, 11" in out
    assert "clock begins at 0.5 s" in out
    assert out.count("are needed") == out.count("clock begins") == 1


def _missing(folder, **changes):
    with pytest.raises(KeyError) as found:
        open_source(data_config(folder.root, **changes), MODEL)
    return found.value.args[0]


def test_a_missing_key_lists_what_the_set_has(tmp_path):
    folder = Folder(tmp_path / "set", cameras={"observation.images.cam_high": "video"})
    text = _missing(folder)
    assert f"{folder.root} has no '{TOP}'. Did you mean 'observation.images.cam_high'?" in text
    assert "Its cameras: observation.images.cam_high. Its other keys: observation.state," in text
    keys = {"images": {"top": "front_view"}, "state": "observation.stat", "actions": "action"}
    repack = Group(inputs=(RepackTransform(keys),))
    # A camera for what the pipeline uses as an image, whatever its name; a column for a column.
    assert "Did you mean 'observation.images.cam_high'?" in _missing(
        folder, repack_transforms=repack
    )
    keys["images"]["top"] = "observation.images.cam_high"
    assert "has no 'observation.stat'. Did you mean 'observation.state'?" in _missing(
        folder, repack_transforms=repack
    )
    text = _missing(folder, cameras=("cam_high",), action_sequence_keys=("actions",))
    assert "has no 'actions'. Did you mean 'action'?" in text


def test_a_declared_key_without_data_is_missing_as_well(tmp_path):
    folder = Folder(tmp_path / "set")
    for episode in range(3):
        folder.rewrite(episode, observation__state=None)
    assert "has no 'observation.state'. Its cameras: observation.images.top" in _missing(folder)


def test_training_needs_the_videos_of_its_cameras(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "video", WRIST: "video"})
    shutil.rmtree(folder.video_path(0, WRIST).parent)
    assert open_source(data_config(folder.root), MODEL).cameras == (TOP,)
    with pytest.raises(FileNotFoundError, match=r"wrist.*episode_000000\.mp4 is missing"):
        open_source(data_config(folder.root, cameras=("top", "wrist")), MODEL)

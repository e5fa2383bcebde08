"""v2.x becomes v3.0: the same numbers, the same frames."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from piston.data import check_dataset, open_dataset
from piston.data.convert import convert_to_v30
from piston.data.record import Recorder
from piston.files import json_line, read_json, write_json

from .recording_cases import (
    FEATURES,
    FPS,
    VIDEO,
    as_v21,
    check_set,
    files_of,
    record,
    seen_in,
    video,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recorded") / "set"
    with Recorder(root, FPS, FEATURES, "arm", "h264") as recorder:
        for episode in range(5):
            record(recorder, episode)
    return root


@pytest.fixture
def source(tmp_path: Path, recorded: Path) -> Path:
    return as_v21(recorded, tmp_path / "v21")


def assert_same_items(source: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    before, after = open_dataset(source), open_dataset(target)
    assert len(before) == len(after)
    for index in range(len(before)):
        old, new = before[index], after[index]
        assert set(old) - set(but) == set(new) - set(but)
        for key in set(new) - set(but):
            np.testing.assert_array_equal(new[key], old[key], err_msg=key)
            assert np.asarray(new[key]).dtype == np.asarray(old[key]).dtype, key


def test_v21_keeps_everything(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    target = tmp_path / "v30"
    done = convert_to_v30(source, target, lambda *numbers: calls.append(numbers))
    assert (done.num_episodes, done.num_encoded, done.num_retimed) == (5, 0, 0)
    assert calls[-1] == (done.num_frames, done.num_frames)
    assert len(calls) == 5
    assert check_set(target) == 5
    assert check_dataset(target) == []
    assert_same_items(source, target)  # frames to the bit: nothing was encoded anew
    info = json.loads((target / "meta/info.json").read_text())
    assert (info["codebase_version"], info["robot_type"]) == ("v3.0", "arm")
    assert info["features"][VIDEO]["info"]["video.codec"] == "h264"
    # Image statistics are the source's own, column statistics have quantiles now.
    episodes = pq.read_table(target / "meta/episodes/chunk-000/file-000.parquet")
    lines = (source / "meta/episodes_stats.jsonl").read_text().splitlines()
    for row, line in zip(episodes.to_pylist(), lines):
        assert row[f"stats/{VIDEO}/mean"] == json.loads(line)["stats"][VIDEO]["mean"]
        assert row["stats/action/q01"] is not None
    assert f"stats/{VIDEO}/q01" not in episodes.column_names


def test_videos_are_not_copied_where_they_can_be_linked(source: Path, tmp_path: Path) -> None:
    old = source / f"videos/chunk-000/{VIDEO}/episode_000000.mp4"
    # As in Hugging Face's cache: files are links to where their content is.
    old.rename(tmp_path / "blob")
    old.symlink_to("../../../../blob")
    convert_to_v30(source, tmp_path / "v30")
    new = tmp_path / f"v30/videos/{VIDEO}/chunk-000/file-000.mp4"
    assert not new.is_symlink()
    assert new.samefile(tmp_path / "blob")
    (tmp_path / "blob").unlink()
    shutil.rmtree(source)
    assert check_set(tmp_path / "v30") == 5


def test_image_statistics_can_be_computed_anew(source: Path, tmp_path: Path) -> None:
    (tmp_path / "v21/meta/episodes_stats.jsonl").rename(tmp_path / "kept.jsonl")
    convert_to_v30(source, tmp_path / "a")  # a set without them, such as v2.0
    (tmp_path / "kept.jsonl").rename(tmp_path / "v21/meta/episodes_stats.jsonl")
    convert_to_v30(source, tmp_path / "b", recompute_image_stats=True)
    stats = [json.loads((tmp_path / name / "meta/stats.json").read_text()) for name in "ab"]
    assert stats[0] == stats[1]
    assert np.shape(stats[0][VIDEO]["q99"]) == (3, 1, 1)
    frames = np.concatenate([video(path)[-1] for path in sorted(source.glob("videos/**/*.mp4"))])
    np.testing.assert_allclose(
        np.ravel(stats[0][VIDEO]["mean"]), frames.mean(axis=(0, 1, 2)) / 255, rtol=1e-9
    )


def test_a_converted_set_can_be_continued(source: Path, tmp_path: Path) -> None:
    convert_to_v30(source, tmp_path / "v30")
    with Recorder.open(tmp_path / "v30", codec="av1") as recorder:
        record(recorder, 5)
    assert check_set(tmp_path / "v30") == 6


def test_reference_sets(reference: Path, tmp_path: Path) -> None:
    source = reference / "datasets/lerobot_v21"
    done = convert_to_v30(source, tmp_path / "v30")
    assert (done.num_episodes, done.num_frames, done.num_encoded) == (3, 60, 0)
    assert_same_items(source, tmp_path / "v30")
    assert check_dataset(tmp_path / "v30") == []


def test_gr00t_v20(reference: Path, tmp_path: Path) -> None:
    source = reference / "datasets/gr00t_robot_sim_PickNPlace"
    done = convert_to_v30(source, tmp_path / "v30")
    assert done.ignored == ("observation.images.egoview",)
    assert (done.num_episodes, done.num_frames, done.num_encoded) == (5, 2096, 0)
    before, after = open_dataset(source), open_dataset(tmp_path / "v30")
    assert dict(after.metadata.tasks) == dict(before.metadata.tasks)
    assert [e.tasks for e in after.metadata.episodes] == [e.tasks for e in before.metadata.episodes]
    for key in ("observation.state", "action", "task_index", "next.done"):
        np.testing.assert_array_equal(after.column(key), before.column(key))
    # The source's time stamps are late by a frame; those of the last rows would show the next
    # episode.
    assert done.num_retimed == 5
    times = after.column("frame_index") / 20
    np.testing.assert_allclose(after.column("timestamp"), times, atol=1e-5)
    camera = "observation.images.ego_view"
    for index in (0, 415, 416, 900, 2095):  # with B-frames, across the joints
        np.testing.assert_array_equal(after[index][camera], before[index][camera])
    assert [p.severity for p in check_dataset(tmp_path / "v30") if p.severity == "error"] == []


def change_info(root: Path, change: Any) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def test_untidy_declarations_are_put_right(source: Path, tmp_path: Path) -> None:
    def untidy(info: dict[str, Any]) -> None:
        info["codebase_version"] = "v2.0"
        info["features"]["observation.images.gone"] = dict(info["features"][VIDEO])
        info["features"]["reward"] = {"dtype": "float32", "shape": [1], "names": None}
        info["features"][VIDEO]["shape"] = [480, 640, 3]
        info["features"][VIDEO]["info"]["video.codec"] = "av1"
        for key in ("timestamp", "index", "task_index"):
            del info["features"][key]

    change_info(source, untidy)
    for path in source.glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["index", "task_index"]), path)
    done = convert_to_v30(source, tmp_path / "v30")
    assert set(done.ignored) == {"observation.images.gone", "reward"}
    features = json.loads((tmp_path / "v30/meta/info.json").read_text())["features"]
    assert features[VIDEO]["shape"] == [64, 96, 3]
    assert features[VIDEO]["info"]["video.codec"] == "h264"
    assert check_set(tmp_path / "v30") == 5


def test_broken_episodes_are_an_error_or_left_out(source: Path, tmp_path: Path) -> None:
    (source / f"videos/chunk-000/{VIDEO}/episode_000001.mp4").unlink()
    cut = source / "data/chunk-000/episode_000003.parquet"
    cut.write_bytes(cut.read_bytes()[:200])
    target = tmp_path / "v30"
    with pytest.raises(ValueError, match="2 episodes cannot be converted, the first: episode 1"):
        convert_to_v30(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["v21"]  # nothing is left behind
    done = convert_to_v30(source, target, skip_broken=True)
    assert set(done.skipped) == {"episode 1", "episode 3"}
    dataset = open_dataset(target)
    assert [episode.index for episode in dataset.metadata.episodes] == [0, 1, 2]
    seen = [seen_in(dataset[start][VIDEO]) for start, _ in dataset.episode_bounds]
    assert seen == [(0, 0), (2, 0), (4, 0)]


def test_a_video_with_too_many_frames_is_encoded_anew(source: Path, tmp_path: Path) -> None:
    longer = source / f"videos/chunk-000/{VIDEO}/episode_000001.mp4"
    shutil.copyfile(source / f"videos/chunk-000/{VIDEO}/episode_000003.mp4", tmp_path / "long.mp4")
    frames = [*video(longer)[-1], *video(tmp_path / "long.mp4")[-1]]
    with av.open(str(longer), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS, options={"qscale": "2"})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    done = convert_to_v30(source, tmp_path / "v30", codec="h264")
    assert done.num_encoded == 1
    assert check_set(tmp_path / "v30") == 5


def test_videos_of_another_encoder_are_kept(source: Path, tmp_path: Path) -> None:
    # With B-frames, among ours without.
    path = source / f"videos/chunk-000/{VIDEO}/episode_000002.mp4"
    frames = video(path)[-1]
    with av.open(str(path), "w") as container:
        options = {"crf": "5", "bf": "2", "g": "30"}
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    done = convert_to_v30(source, tmp_path / "v30")
    assert done.num_encoded == 0
    assert len(list((tmp_path / "v30").glob("videos/*/*/*.mp4"))) == 5
    assert_same_items(source, tmp_path / "v30")


def test_images_in_files_are_taken_into_the_tables(tmp_path: Path) -> None:
    features = {
        "camera": {"dtype": "image", "shape": (8, 8, 3)},
        "action": {"dtype": "float32", "shape": (2,)},
    }
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    with Recorder(tmp_path / "set", 5, features) as recorder:
        for step in range(4):
            frame = {"camera": images[step], "action": np.full(2, step, np.float32)}
            recorder.add_frame(frame, "look")
        recorder.save_episode()
    source = as_v21(tmp_path / "set", tmp_path / "v21")
    path = source / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    cells = []
    for step, image in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG")
        (source / f"images/{step}.png").parent.mkdir(exist_ok=True)
        (source / f"images/{step}.png").write_bytes(buffer.getvalue())
        cells.append({"bytes": None, "path": f"images/{step}.png"})
    column = table.column_names.index("camera")
    cell_type = table.schema.field("camera").type
    pq.write_table(table.set_column(column, "camera", pa.array(cells, cell_type)), path)
    convert_to_v30(source, tmp_path / "v30", recompute_image_stats=True)
    shutil.rmtree(source)
    dataset = open_dataset(tmp_path / "v30")
    for step in range(4):
        np.testing.assert_array_equal(dataset[step]["camera"], images[step])


def test_a_target_is_never_overwritten_unasked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "v30"
    target.mkdir()
    (target / "precious").write_text("")
    with pytest.raises(FileExistsError, match="exists already"):
        convert_to_v30(source, target)
    assert (target / "precious").exists()
    (target / "precious").unlink()
    convert_to_v30(source, target)  # an empty folder
    with pytest.raises(FileExistsError, match="exists already"):
        convert_to_v30(source, target)
    (target / "data/old.parquet").touch()
    convert_to_v30(source, target, overwrite=True)
    assert check_set(target) == 5
    assert not (target / "data/old.parquet").exists()
    with pytest.raises(ValueError, match="v3.0 already"):
        convert_to_v30(target, tmp_path / "again")
    for folder in (source, tmp_path):
        with pytest.raises(ValueError, match="contains .*v21, which is read"):
            convert_to_v30(source, folder, overwrite=True)
    assert check_set(source) == 5


@pytest.mark.parametrize(
    "overwritten",
    [
        "notes",
        "set and notes",
        "notes in a set",
        "v2.1 set",
        "LeRobot's v3.0 set",
        "set and source",
    ],
)
def test_only_a_set_that_piston_wrote_is_replaced(
    source: Path, tmp_path: Path, overwritten: str
) -> None:
    target, message = tmp_path / "target", "it is not a data set"
    if overwritten == "v2.1 set":
        shutil.copytree(source, target)
        witness, message = target / "data/witness", "Piston did not write this"
    elif overwritten == "notes":
        witness = target / "witness"
        target.mkdir()
    else:
        convert_to_v30(source, target)
        witness, message = target / "witness", "it contains witness, which is not part"
    if overwritten == "notes in a set":
        witness, message = target / "data/chunk-000/notes.txt", "it contains data/chunk-000/notes"
    if overwritten == "LeRobot's v3.0 set":
        (target / "meta/piston.json").unlink()
        witness, message = target / "meta/witness.json", "Piston did not write this"
    witness.write_text("precious")
    if overwritten == "set and source":
        source, message = source.rename(target / "meta/v21"), "contains .*v21, which is read"
        witness.unlink()
        witness = source / "witness"
        witness.write_text("precious")
    before = files_of(tmp_path)
    with pytest.raises((FileExistsError, ValueError), match=message):
        convert_to_v30(source, target, overwrite=True)
    assert files_of(tmp_path) == before
    assert witness.read_text() == "precious"


def test_a_set_that_the_source_links_to_is_not_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "v30"
    convert_to_v30(source, target)
    (source / "data").rename(target / "data/v21")
    (source / "data").symlink_to(target / "data/v21")
    with pytest.raises(ValueError, match="contains .*v21/data, which is read"):
        convert_to_v30(source, target, overwrite=True)
    assert check_set(source) == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", "x"), ("mean", [[[1e30]]] * 3), ("mean", [[[0.5]]] * 2), ("count", {})],
)
def test_image_statistics_that_are_not_usable_are_computed_again(
    source: Path, tmp_path: Path, name: str, value: Any
) -> None:
    convert_to_v30(source, tmp_path / "good", recompute_image_stats=True)
    path = source / "meta/episodes_stats.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["stats"][VIDEO][name] = value
    path.write_text("".join(map(json_line, rows)))
    convert_to_v30(source, tmp_path / "v30")
    stats = [read_json(tmp_path / folder / "meta/stats.json")[VIDEO] for folder in ("good", "v30")]
    assert stats[0] == stats[1]


def test_a_type_that_is_none_is_an_error_that_names_the_feature(
    source: Path, tmp_path: Path
) -> None:
    info = read_json(source / "meta/info.json")
    info["features"]["action"]["dtype"] = "float33"
    write_json(source / "meta/info.json", info)
    with pytest.raises(ValueError, match=r"action is declared as float33\[2\], not as numbers"):
        convert_to_v30(source, tmp_path / "v30")


def test_a_failed_overwrite_keeps_the_old_set(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "v30"
    convert_to_v30(source, target)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("piston.data.record.writer.publish", fail)
    with pytest.raises(OSError, match="No space"):
        convert_to_v30(source, target, overwrite=True)
    assert check_set(target) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v21", "v30"]

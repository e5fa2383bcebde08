"""Metadata of all versions of the format, and of untidy folders."""

import json
import os
import shutil

import pyarrow as pa
import pytest

from piston.data import check_dataset, open_dataset
from piston.data.convert import convert_to_v30
from piston.data.format import Feature, dimension_names
from piston.data.location import lerobot_home, locate
from piston.data.metadata import Metadata
from piston.data.video import VideoError, VideoReader, probe_video

from .opened_files import count_opened
from .synthetic import FPS, Folder

TOP = "observation.images.top"


def _whats(metadata):
    return [f"{problem.where}: {problem.what}" for problem in metadata.problems]


@pytest.mark.parametrize(("name", "frames"), [("lerobot_v21", 60), ("lerobot_v30", 71)])
def test_sets_written_by_lerobot_are_read_without_problems(small_reference, name, frames):
    metadata = Metadata.read(small_reference / "datasets" / name)
    assert metadata.version == f"v{name[-2]}.{name[-1]}"
    assert (metadata.fps, metadata.total_frames, len(metadata.episodes)) == (25, frames, 3)
    assert metadata.cameras == (TOP, "observation.images.wrist")
    assert metadata.tasks == {0: "Transfer cube", 1: "Open the drawer"}
    assert metadata.episodes[1].tasks == ("Open the drawer",)
    assert metadata.episodes[1].start == metadata.episodes[0].length
    assert metadata.features["action"].shape == (14,)
    assert metadata.problems == ()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["shoulder", "elbow"], ["shoulder", "elbow"]),
        ({"motors": ["shoulder", "elbow"]}, ["shoulder", "elbow"]),
        ({"left": ["elbow"], "right": ["elbow"]}, ["elbow[0]", "elbow[1]"]),
        (["shoulder"], ["action[0]", "action[1]"]),
        (None, ["action[0]", "action[1]"]),
    ],
)
def test_names_of_dimensions_are_unique(names, expected):
    feature = Feature("action", "float32", (2,), names)
    assert dimension_names([feature], 2, "action") == expected


def test_a_camera_that_is_declared_but_has_no_files_is_ignored_and_reported(reference):
    metadata = Metadata.read(reference / "datasets" / "gr00t_robot_sim_PickNPlace")
    assert (metadata.version, metadata.fps, metadata.total_frames) == ("v2.0", 20, 2096)
    assert metadata.cameras == ("observation.images.ego_view",)
    assert [p.where for p in metadata.problems] == ["observation.images.egoview"]


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_nothing_but_meta_is_needed(tmp_path, version):
    folder = Folder(tmp_path / "set", version)
    shutil.rmtree(folder.root / "data")
    shutil.rmtree(folder.root / "videos")
    metadata = Metadata.read(folder.root, files=False)
    assert metadata.total_frames == sum(folder.lengths)
    assert metadata.cameras == (TOP,)
    assert metadata.problems == ()


def test_an_episode_of_v3_knows_its_place_in_a_shared_file(tmp_path):
    metadata = Metadata.read(Folder(tmp_path / "set", "v3.0", lengths=(12, 9)).root)
    span = metadata.episodes[1].videos[TOP]
    assert span.path == f"videos/{TOP}/chunk-000/file-000.mp4"
    assert (span.start, span.stop) == (12 / FPS, 21 / FPS)


def test_a_folder_named_video_is_found(tmp_path):
    folder = Folder(tmp_path / "set")
    (folder.root / "videos").rename(folder.root / "video")
    metadata = Metadata.read(folder.root)
    assert metadata.episodes[0].videos[TOP].path.startswith("video/chunk-000/")
    [found] = _whats(metadata)
    assert "no file videos/chunk-000/" in found
    assert "but video/chunk-000/" in found


def test_missing_files_cost_their_own_episode(tmp_path):
    folder = Folder(tmp_path / "set")
    folder.video_path(1).unlink()
    folder.data_path(2).unlink()
    metadata = Metadata.read(folder.root)
    assert [(p.episode, p.camera, p.leaves_out) for p in metadata.problems] == [
        (1, TOP, True),
        (2, None, True),
    ]


def test_a_line_cut_by_a_crash_costs_its_own_episode(tmp_path):
    folder = Folder(tmp_path / "set")
    path = folder.root / "meta/episodes.jsonl"
    path.write_text(path.read_text()[:-20] + "\n\n")
    metadata = Metadata.read(folder.root)
    assert [episode.index for episode in metadata.episodes] == [0, 1]
    assert any("episodes.jsonl:3" in what for what in _whats(metadata))


def test_a_damaged_table_of_episodes_costs_the_episodes_it_lists(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    damaged = folder.root / "meta/episodes/chunk-000/file-001.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    metadata = Metadata.read(folder.root)
    assert len(metadata.episodes) == 3
    assert any("file-001.parquet: cannot be read" in what for what in _whats(metadata))


@pytest.mark.parametrize("column", ["data/chunk_index", f"videos/{TOP}/from_timestamp"])
def test_a_row_without_a_number_costs_its_own_episode(tmp_path, column):
    folder = Folder(tmp_path / "set", "v3.0")
    rows = [folder.episode_row(episode) for episode in range(3)]
    for row in rows:  # as pandas writes a column with a missing value
        row[column] = float("nan") if row is rows[1] else float(row[column])
    folder.write_episodes(rows)
    metadata = Metadata.read(folder.root)
    left_out = {problem.episode for problem in metadata.problems if problem.leaves_out}
    assert {episode.index for episode in metadata.episodes} - left_out == {0, 2}


@pytest.mark.parametrize("value", ["x", [1.0], -1, True])
def test_a_table_with_columns_of_other_types_is_read_as_far_as_possible(tmp_path, value):
    folder = Folder(tmp_path / "set", "v3.0")
    rows = [folder.episode_row(episode) for episode in range(3)]
    folder.write_episodes([row | {f"videos/{TOP}/to_timestamp": value} for row in rows])
    assert len(open_dataset(folder.root).episodes) == 3  # the frames are those of the rows
    folder.write_episodes([row | {f"videos/{TOP}/from_timestamp": value} for row in rows])
    assert TOP not in Metadata.read(folder.root).cameras or value is True
    with pytest.raises((ValueError, FileNotFoundError), match="overlaps|does not say where"):
        open_dataset(folder.root)
    folder.write_episodes([row | {"tasks": value} for row in rows])
    if isinstance(value, str | list):
        assert [episode.tasks for episode in Metadata.read(folder.root).episodes] == [
            (str(value[0]),)
        ] * 3
    else:
        with pytest.raises(ValueError, match="no episode that can be read.*\n.*not a usable ep"):
            Metadata.read(folder.root)


def test_without_a_list_of_tasks_the_episodes_keep_theirs(tmp_path):
    folder = Folder(tmp_path / "set")
    (folder.root / "meta/tasks.jsonl").unlink()
    metadata = Metadata.read(folder.root)
    assert metadata.tasks == {}
    assert metadata.episodes[1].tasks == ("open the drawer",)
    assert [p.where for p in metadata.problems] == ["meta/tasks.jsonl"]


def test_wrong_totals_are_reported_and_not_used(tmp_path):
    folder = Folder(tmp_path / "set")
    folder.edit_info(total_frames=7)
    metadata = Metadata.read(folder.root)
    assert metadata.total_frames == 36
    assert any(
        "total_frames is 7, the list of episodes gives 36" in what for what in _whats(metadata)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, "v1.6.*can be read"),
        ({"fps": 0}, "fps is 0"),
        ({"fps": None}, "fps is None"),
        ({"features": None}, "declares no features"),
        ({"data_path": "data/{episode}.parquet"}, "data_path.*cannot be filled in"),
        ({"data_path": "data/{episode_index[0]}.parquet"}, "data_path.*cannot be filled in"),
        ({"data_path": "data/{episode_index.real}.parquet"}, "data_path.*cannot be filled in"),
        ({"data_path": "data/{"}, "data_path.*cannot be filled in"),
        ({"data_path": ["data"]}, "data_path.*cannot be filled in"),
        ({"video_path": "videos/{video_key:d}.mp4"}, "video_path.*cannot be filled in"),
        ({"chunks_size": [1000]}, r"chunks_size is \[1000\]"),
        ({"chunks_size": -1}, "chunks_size is -1"),
        ({"features": {"action": {"shape": [3]}}}, "info.json: feature 'action' has no dtype"),
    ],
)
def test_what_leaves_nothing_to_read_is_an_error(tmp_path, changes, message):
    folder = Folder(tmp_path / "set")
    folder.edit_info(**changes)
    with pytest.raises(ValueError, match=message):
        Metadata.read(folder.root)


def test_a_missing_version_is_inferred_from_the_layout(tmp_path):
    folder = Folder(tmp_path / "set", "v3.0")
    folder.edit_info(codebase_version=None)
    assert Metadata.read(folder.root).version == "v3.0"


def test_a_folder_above_the_set_names_it(tmp_path):
    Folder(tmp_path / "sets" / "mine")
    with pytest.raises(FileNotFoundError, match=r"not a LeRobot data set.*sets/mine"):
        Metadata.read(tmp_path / "sets")


def test_info_that_is_no_json_is_an_error(tmp_path):
    folder = Folder(tmp_path / "set")
    (folder.root / "meta/info.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        Metadata.read(folder.root)


def test_a_template_of_ones_own_is_followed(tmp_path):
    folder = Folder(tmp_path / "set")
    moved = folder.root / "data/all"
    (folder.root / "data/chunk-000").rename(moved)
    folder.edit_info(data_path="data/all/episode_{episode_index:06d}.parquet")
    metadata = Metadata.read(folder.root)
    assert metadata.episodes[0].data_path == "data/all/episode_000000.parquet"
    assert metadata.problems == ()


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("part", ["data", "video"])
def test_no_path_leads_outside_the_set(tmp_path, version, absolute, part):
    folder = Folder(tmp_path / "set", version, lengths=(4,))
    witness = tmp_path / "outside" / ("0.parquet" if part == "data" else "0.mp4")
    witness.parent.mkdir()
    inside = folder.data_path(0) if part == "data" else folder.video_path(0)
    inside.rename(witness)  # a reader that went there would succeed
    before = witness.read_bytes(), witness.stat().st_mtime_ns
    number = "{episode_index}" if version == "v2.1" else "{file_index}"
    above = tmp_path if absolute else f"{part}/x/../../.."
    folder.edit_info(**{f"{part}_path": f"{above}/outside/{number}{witness.suffix}"})
    with count_opened(witness.parent) as opened:
        for use in (
            Metadata.read,
            lambda root: Metadata.read(root, files=False),
            open_dataset,
            check_dataset,
            lambda root: convert_to_v30(root, tmp_path / "new", skip_broken=True),
        ):
            with pytest.raises(ValueError, match=f"{part}_path is .* a path inside the set"):
                use(folder.root)
    assert opened == {}
    assert (witness.read_bytes(), witness.stat().st_mtime_ns) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "set"]


def test_a_cameras_name_does_not_lead_outside_the_set(tmp_path):
    folder = Folder(tmp_path / "set")
    features = json.loads((folder.root / "meta/info.json").read_text())["features"]
    folder.edit_info(features={**features, "../../../outside": features[TOP]})
    with pytest.raises(ValueError, match="video_path is .* a path inside"):
        Metadata.read(folder.root)


def test_local_places_come_before_the_hub(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    (home / "owner/name").mkdir(parents=True)
    here.mkdir()
    monkeypatch.setenv("HF_LEROBOT_HOME", str(home))
    monkeypatch.chdir(here)
    assert locate("owner/name") == home / "owner/name"
    (here / "owner/name").mkdir(parents=True)
    assert locate("owner/name").resolve() == here / "owner/name"


def test_the_home_of_lerobot_follows_the_environment(monkeypatch):
    monkeypatch.delenv("HF_LEROBOT_HOME", raising=False)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert os.fspath(lerobot_home()) == "/somewhere/lerobot"


def test_what_is_nowhere_goes_to_the_hub_or_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    asked = []

    def resolve(location):
        asked.append(location)
        return tmp_path / "downloaded" / location.rsplit("/", 1)[1]

    monkeypatch.setattr("piston.data.location.resolve", resolve)
    assert locate("owner/name") == tmp_path / "downloaded/name"
    assert locate("hf://datasets/owner/name", only_meta=True) == tmp_path / "downloaded"
    assert asked == ["hf://datasets/owner/name", "hf://datasets/owner/name/meta"]
    with pytest.raises(FileNotFoundError, match="There is no data set"):
        locate(str(tmp_path / "not" / "here" / "at" / "all"))


def test_metadata_is_read_the_same_when_lines_have_other_fields(tmp_path):
    folder = Folder(tmp_path / "set")
    path = folder.root / "meta/episodes.jsonl"
    rows = [json.loads(line) | {"extra": [1]} for line in path.read_text().splitlines()]
    rows[0]["tasks"] = "one sentence"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert Metadata.read(folder.root).episodes[0].tasks == ("one sentence",)


@pytest.mark.parametrize("absolute", [False, True])
def test_an_image_outside_the_set_is_not_read(tmp_path, absolute):
    folder = Folder(tmp_path / "set", lengths=(3,), cameras={TOP: "image"})
    witness = tmp_path / "outside" / "secret.png"
    witness.parent.mkdir()
    cells = folder.columns(0)[TOP].to_pylist()
    witness.write_bytes(cells[1]["bytes"])
    cells[1] = {"bytes": None, "path": str(witness) if absolute else "../outside/secret.png"}
    folder.rewrite(0, **{TOP.replace(".", "__"): pa.array(cells)})
    dataset = open_dataset(folder.root)
    assert dataset[0][TOP].any()
    with count_opened(witness.parent) as opened:
        with pytest.raises(ValueError, match="its path leads outside the data set"):
            dataset[1]
        problems = check_dataset(folder.root)
        with pytest.raises(ValueError, match=r"outside the data set"):
            convert_to_v30(folder.root, tmp_path / "new")
    assert any("leads outside the data set" in problem.what for problem in problems)
    assert opened == {}


@pytest.mark.parametrize("codec", ["zzzz", ["h264"], 3, {}])
def test_a_declared_codec_that_is_unknown_is_a_note(tmp_path, codec):
    folder = Folder(tmp_path / "set", lengths=(3,))
    features = json.loads((folder.root / "meta/info.json").read_text())["features"]
    features[TOP]["info"]["video.codec"] = codec
    folder.edit_info(features=features)
    assert open_dataset(folder.root)[0][TOP].any()
    [problem] = check_dataset(folder.root)
    assert (problem.severity, problem.what) == ("note", f"the codec is h264, declared is {codec}")


def test_a_video_with_an_unknown_codec_tag_is_left_out(tmp_path):
    folder = Folder(tmp_path / "set", lengths=(3, 4))
    path = folder.video_path(0)
    before, tag, after = path.read_bytes().rpartition(b"avc1")
    assert tag
    path.write_bytes(before + b"zzzz" + after)
    with pytest.raises(VideoError, match="episode_000000.mp4 has video of a codec"):
        VideoReader(path)
    with pytest.raises(VideoError, match="episode_000000.mp4 has video of a codec"):
        probe_video(path, FPS)
    problems = check_dataset(folder.root)
    assert any(problem.episode == 0 and "codec" in problem.what for problem in problems)
    with pytest.raises(ValueError, match=r"episode_000000\.mp4 has video of a codec"):
        convert_to_v30(folder.root, tmp_path / "new")
    with pytest.raises(ValueError, match="has video of a codec"):
        open_dataset(folder.root)[0]

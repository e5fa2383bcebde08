"""Labels of subtasks and questions: written, read, checked and converted."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.cli import main
from piston.data import check_dataset, findings, language, open_dataset
from piston.data.check import usable
from piston.data.convert import convert_to_v30
from piston.data.describe import describe_robot
from piston.data.language import Question
from piston.data.metadata import Metadata
from piston.data.problems import EpisodeError
from piston.data.record import Recorder
from piston.data.record.declare import FrameError

from .recording_cases import as_v21, files_of
from .synthetic import Folder

TOP, WRIST = "observation.images.top", "observation.images.wrist"
CAMERAS = {camera: {"dtype": "image", "shape": (8, 8, 3)} for camera in (TOP, WRIST)}
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,)},
    "action": {"dtype": "float32", "shape": (2,)},
}
HOW_MANY = Question(TOP, "How many cups are there?", "two")
WHERE = Question(WRIST, "Where is the handle?", '{"point": [3, 4]}')
COLOUR = Question(TOP, "What colour is the left cup?", "blue")
# Of three episodes: the subtask of each frame, and questions by frame.
SUBTASKS = (
    ["", "", "reach", "reach", "grasp", "reach"],
    [""] * 4,
    ["lift", "lift", "reach", "reach", "reach"],
)
QUESTIONS: tuple[dict[int, list[Question]], ...] = (
    {0: [HOW_MANY], 3: [WHERE, COLOUR, HOW_MANY]},
    {},
    {4: [WHERE]},
)
ASKED = [(0, HOW_MANY), (3, WHERE), (3, COLOUR), (3, HOW_MANY), (14, WHERE)]


def frame_of(number: int, cameras: dict[str, Any] = CAMERAS) -> dict[str, Any]:
    values = {key: np.float32([number, -number]) for key in FEATURES}
    pictures = {
        c: np.full((8, 8, 3), 60 + 20 * i + 10 * number, np.uint8) for i, c in enumerate(cameras)
    }
    return {**values, **pictures}


def record(root: Path, episodes: range = range(3), **options: Any) -> Path:
    with Recorder(root, 10, FEATURES | CAMERAS, **{"language": True, **options}) as recorder:
        for episode in episodes:
            for step, subtask in enumerate(SUBTASKS[episode]):
                questions = QUESTIONS[episode].get(step, [])
                frame = frame_of(step + episode)
                recorder.add_frame(frame, "tidy up", subtask=subtask or None, questions=questions)
            recorder.save_episode()
    return root


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("sets") / "set")


def all_subtasks(dataset: Any) -> list[str]:
    return [dataset[index]["subtask"] for index in range(len(dataset))]


def test_what_was_recorded_is_read(recorded: Path) -> None:
    dataset = open_dataset(recorded, language=True)
    assert all_subtasks(dataset) == [text for one in SUBTASKS for text in one]
    assert dataset.subtasks == ("reach", "grasp", "lift")
    assert sorted(dataset.questions) == sorted(ASKED)
    for index, question in dataset.questions:
        episode, step = dataset.place(index)
        image = dataset.frame(index, [question.camera])[question.camera]
        expected = frame_of(step + episode.index)[question.camera]
        np.testing.assert_array_equal(image, expected)
    assert check_dataset(recorded) == []


def test_labels_are_read_only_if_they_are_asked_for(recorded, monkeypatch) -> None:
    monkeypatch.setattr(findings, "read_labels", None)
    dataset = open_dataset(recorded)
    assert not {"subtask", *language.LANGUAGE} & dataset[0].keys()
    assert not {*language.LANGUAGE} & {*dataset.keys}
    with pytest.raises(ValueError, match="language=True"):
        _ = dataset.subtasks
    with pytest.raises(ValueError, match="language=True"):
        _ = dataset.questions


@pytest.mark.parametrize("choice", ["2", "1", "0,2", [2, 0]])
def test_labels_of_selected_episodes(recorded: Path, choice: Any) -> None:
    opened = open_dataset(recorded, episodes=choice, language=True)
    selected = open_dataset(recorded, language=True).select(choice)
    indices = [episode.index for episode in selected.episodes]
    assert [episode.index for episode in opened.episodes] == indices
    texts = [text for index in indices for text in SUBTASKS[index]]
    for dataset in (opened, selected):
        assert all_subtasks(dataset) == texts
        assert dataset.subtasks == tuple(dict.fromkeys(filter(None, texts)))
        assert [question for _, question in dataset.questions] == [
            question
            for index in indices
            for questions in QUESTIONS[index].values()
            for question in sorted(questions, key=lambda one: one.camera == TOP)
        ]
        for index, question in dataset.questions:
            episode, step = dataset.place(index)
            assert question in QUESTIONS[episode.index][step]


def test_questions_are_those_of_the_cameras(recorded: Path) -> None:
    wrist = [one for one in ASKED if one[1].camera == WRIST]
    assert list(open_dataset(recorded, cameras=[WRIST], language=True).questions) == wrist
    dataset = open_dataset(recorded, language=True)
    assert list(dataset.select(cameras=[WRIST]).questions) == wrist
    assert dataset.select(cameras=()).questions == ()
    assert dataset.select("2", cameras=[TOP]).questions == ()


def test_a_pickled_set_has_its_labels_in_another_process(recorded: Path, tmp_path: Path) -> None:
    dataset = open_dataset(recorded, language=True).select("0,2")
    shared: list[pickle.PickleBuffer] = []
    pickle.dumps(dataset, protocol=5, buffer_callback=shared.append)
    sizes = [buffer.raw().nbytes for buffer in shared if buffer.raw().readonly]
    assert 4 * sum(map(len, SUBTASKS)) in sizes  # int32
    (tmp_path / "set.pickle").write_bytes(pickle.dumps(dataset))
    program = (
        "import json, pickle, sys; d = pickle.load(open(sys.argv[1], 'rb')); "
        "texts = [d[i]['subtask'] for i in range(len(d))]; "
        "print(json.dumps([texts, d.subtasks, d.questions, "
        "[int(d.frame(i, [q.camera])[q.camera][0, 0, 0]) for i, q in d.questions]]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "set.pickle")],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    texts, subtasks, questions, pixels = json.loads(out)
    assert texts == SUBTASKS[0] + SUBTASKS[2]
    assert tuple(subtasks) == dataset.subtasks
    assert [(index, Question(*one)) for index, one in questions] == list(dataset.questions)
    assert pixels == [
        int(dataset.frame(i, [q.camera])[q.camera][0, 0, 0]) for i, q in dataset.questions
    ]


@pytest.mark.parametrize("fps", [29.97, 30, 50, 10, 1 / 3])
def test_a_subtask_begins_exactly_at_its_frame(tmp_path: Path, fps: float) -> None:
    """At every frame of a long episode, although times are float32."""
    length, root = 2000, tmp_path / "set"
    numbers = np.random.default_rng(0).choice(length, 100, replace=False)
    with Recorder(root, fps, FEATURES, language=True) as recorder:
        expected, text = [], ""
        for step in range(length):
            text = f"step {step}" if step in numbers else text
            expected.append(text)
            recorder.add_frame(frame_of(step, {}), "count", subtask=text)
        recorder.save_episode()
    assert all_subtasks(open_dataset(root, language=True)) == expected


def test_a_time_between_frames_counts_from_the_nearest(tmp_path: Path) -> None:
    root = record(tmp_path / "set", range(1))
    rows = [subtask_row("b", 0.251), subtask_row("a", -0.049), subtask_row("c", 0.549)]
    change(root, 0, persistent=[rows] * 6)
    dataset = open_dataset(root, language=True)
    assert all_subtasks(dataset) == ["a", "a", "a", "b", "b", "c"]
    assert dataset.subtasks == ("a", "b", "c")


def subtask_row(text: Any, time: Any, **fields: Any) -> dict[str, Any]:
    """Fields in LeRobot's order: it lets Arrow infer the type."""
    row = {"role": "assistant", "content": text, "style": "subtask", "timestamp": time}
    return {**row, "camera": None, "tool_calls": None, **fields}


def vqa_rows(*questions: Question) -> list[dict[str, Any]]:
    """In LeRobot's order, which sorts by style, role and camera: answers come first."""
    rows = [
        {"role": role, "content": text, "style": "vqa", "camera": one.camera, "tool_calls": None}
        for one in questions
        for role, text in (("user", one.question), ("assistant", one.answer))
    ]
    return sorted(rows, key=lambda row: (row["role"], row["camera"]))


def change(root: Path, episode: int, persistent: Any = None, events: Any = None) -> None:
    """Replace columns of a recorded set by what Arrow infers."""
    path = root / f"data/chunk-000/file-{episode:03d}.parquet"
    table = pq.read_table(path)
    for key, cells in zip(language.LANGUAGE, (persistent, events)):
        if cells is not None:
            column = cells if isinstance(cells, pa.Array) else pa.array(cells)
            table = table.set_column(table.column_names.index(key), key, column)
    pq.write_table(table, path)


FIELDS = [("content", pa.string()), ("style", pa.string()), ("timestamp", pa.float32())]


@pytest.mark.parametrize("batch_rows", [1, 5, 4096])
def test_a_set_that_lerobot_labelled_is_read(tmp_path, monkeypatch, batch_rows) -> None:
    """Several episodes in a file, types inferred, calls of tools, and episodes without labels."""
    monkeypatch.setattr(language, "_BATCH_ROWS", batch_rows)
    folder = Folder(tmp_path / "set", "v3.0", (12, 9, 15), {TOP: "image", WRIST: "image"})
    info = json.loads((folder.root / "meta/info.json").read_text())
    declared = {"dtype": "language", "shape": [1], "names": None}
    folder.edit_info(features=info["features"] | dict.fromkeys(language.LANGUAGE, declared))
    times = [np.float32(step / 10).item() for step in range(15)]
    first = [
        {**subtask_row("1. reach 2. grasp", 0.0), "style": "plan"},
        subtask_row("reach", 0.0),
        {**subtask_row("tidy the table", 0.0), "style": "task_aug", "role": "user"},
        {**subtask_row("the cup is held", times[7]), "style": "memory"},
        subtask_row("grasp", times[7]),
    ]
    last = [subtask_row("grasp", times[3]), subtask_row("lift", times[14])]
    say = {"type": "function", "function": {"name": "say", "arguments": {"text": "Yes"}}}
    interjection = {"role": "user", "content": "stop", "style": "interjection"}
    talk = [
        {"role": "assistant", "content": None, "style": None, "camera": None, "tool_calls": [say]},
        {**interjection, "camera": None, "tool_calls": None},
    ]
    events: list[Any] = [[]] * 36
    events[0], events[11] = vqa_rows(HOW_MANY, WHERE), vqa_rows(WHERE)
    events[30], events[35] = talk, vqa_rows(HOW_MANY, COLOUR)
    table = pq.read_table(folder.data_path(0))
    table = table.append_column(
        "language_persistent", pa.array([first] * 12 + [[]] * 9 + [last] * 15)
    )
    table = table.append_column("language_events", pa.array(events))
    assert (
        table.schema.field("language_persistent").type.value_type.field("timestamp").type
        == "double"
    )
    pq.write_table(table, folder.data_path(0), row_group_size=7)

    dataset = open_dataset(folder.root, language=True)
    expected = ["reach"] * 7 + ["grasp"] * 5 + [""] * 9 + [""] * 3 + ["grasp"] * 11 + ["lift"]
    assert all_subtasks(dataset) == expected
    assert dataset.subtasks == ("reach", "grasp", "lift")
    questions = [(0, HOW_MANY), (0, WHERE), (11, WHERE), (35, HOW_MANY), (35, COLOUR)]
    assert sorted(dataset.questions) == sorted(questions)
    assert all_subtasks(open_dataset(folder.root, episodes="2", language=True)) == expected[21:]
    assert check_dataset(folder.root) == []


def test_a_file_in_which_nothing_is_labelled(tmp_path: Path) -> None:
    """Arrow infers lists of nulls there; and a file may lack the columns."""
    root = record(tmp_path / "set")
    change(root, 0, pa.array([[]] * 6), pa.array([[]] * 6))
    change(root, 2, pa.nulls(5), pa.nulls(5))
    change(root, 1, pa.array([None] * 4, pa.list_(pa.struct(FIELDS))), events=[[None]] * 4)
    dataset = open_dataset(root, language=True)
    assert (dataset.subtasks, dataset.questions) == ((), ())
    path = root / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns([*language.LANGUAGE]), path)
    assert len(open_dataset(root, language=True).episodes) == len(open_dataset(root).episodes) == 3
    assert check_dataset(root) == []


def bare(row: dict[str, Any], *without: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in without}


FIRST = subtask_row("reach", 0.1)
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "late": (
        {"persistent": [[FIRST, subtask_row("grasp", 0.55)]] * 6},
        ["'grasp' begins at 0.55 s"],
    ),
    "early": ({"persistent": [[subtask_row("grasp", -0.06)]] * 6}, ["'grasp'", "-0.06 s"]),
    "nan": ({"persistent": [[subtask_row("grasp", float("nan"))]] * 6}, ["'grasp'", "nan"]),
    "empty": ({"persistent": [[FIRST, subtask_row(" ", 0.3)]] * 6}, ["at 0.3 s is ' '"]),
    "no text": ({"persistent": [[FIRST, subtask_row(None, 0.3)]] * 6}, ["at 0.3 s is None"]),
    "two": (
        {"persistent": [[FIRST, subtask_row("grasp", 0.1)]] * 6},
        ["two subtasks at 0.1 s: 'reach', 'grasp'"],
    ),
    "number": ({"persistent": [[subtask_row(5, 0.1)]] * 6}, ["is 5, not a sentence"]),
    "time": ({"persistent": [[subtask_row("a", "0.1")]] * 6}, ["'a' has the timestamp '0.1'"]),
    "texts": ({"persistent": ["reach"] * 6}, ["language_persistent is of type string", "structs"]),
    "fields": ({"persistent": [[bare(FIRST, "timestamp")]] * 6}, ["structs", "timestamp"]),
    "camera": (
        {"events": [[], vqa_rows(HOW_MANY._replace(camera="observation.images.topp")), *[[]] * 4]},
        ["frame 1", "'observation.images.topp'", f"Did you mean '{TOP}'?"],
    ),
    "no camera": (
        {"events": [vqa_rows(HOW_MANY)[:1] + [{**vqa_rows(HOW_MANY)[1], "camera": None}]] * 6},
        ["frame 0", "names the camera None"],
    ),
    "no answer": (
        {"events": [*[[]] * 3, vqa_rows(HOW_MANY)[1:], *[[]] * 2]},
        ["frame 3", "question 'How many cups are there?'", "has no answer"],
    ),
    "no question": ({"events": [*[[]] * 5, vqa_rows(WHERE)[:1]]}, ["frame 5", "has no question"]),
    "other camera": (
        {"events": [*[[]] * 5, [vqa_rows(HOW_MANY)[0], vqa_rows(WHERE)[1]]]},
        ["frame 5", "has no question"],
    ),
    "empty answer": (
        {"events": [*[[]] * 5, vqa_rows(HOW_MANY._replace(answer=""))]},
        ["frame 5", "answer", "is ''"],
    ),
    "role": (
        {"events": [*[[]] * 5, [{**vqa_rows(HOW_MANY)[0], "role": "system"}]]},
        ["frame 5", "has the role 'system'"],
    ),
    "events": ({"events": [1] * 6}, ["language_events is of type int64"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_labels(tmp_path: Path, name: str) -> None:
    changes, parts = WRONG[name]
    root = record(tmp_path / "set", range(2))
    # Every row of the first frame's list is repeated in all of them.
    change(root, 0, **changes)
    with pytest.raises(EpisodeError) as error:
        open_dataset(root, language=True)
    assert error.value.episode == 0
    for part in (str(root), "episode 0", *parts):
        assert part in str(error.value)
    assert len(open_dataset(root)) == 10
    assert len(open_dataset(root, episodes="1", language=True)) == 4
    # Training that reads the other kind of labels, or none, is not concerned.
    kind, other = ("questions", "subtasks") if "events" in changes else ("subtasks", "questions")
    assert len(open_dataset(root, language=other)) == 10
    found = check_dataset(root)
    assert usable(found)
    problems = [one for one in found if f"training with {kind} stops there" in one.consequence]
    assert {one.episode for one in problems} == {0}
    assert all(part in problems[0].what for part in parts)


def test_the_check_reports_lists_that_differ_and_unknown_styles(tmp_path: Path) -> None:
    root = record(tmp_path / "set", range(2))
    odd = {**FIRST, "style": "mood"}
    change(root, 0, persistent=[[FIRST, odd]] * 5 + [[FIRST]])
    change(root, 1, events=[[{**vqa_rows(HOW_MANY)[0], "style": "motion"}], [], [], []])
    found = [(one.severity, one.episode, one.what) for one in check_dataset(root)]
    assert found == [
        ("warning", 0, "language_persistent is not the same in all its frames"),
        ("note", 0, "language_persistent has rows of style 'mood'"),
        ("note", 1, "language_events has rows of style 'motion'"),
    ]
    assert usable(check_dataset(root))
    assert all_subtasks(open_dataset(root, language=True)) == ["", *["reach"] * 5, *[""] * 4]


def test_a_damaged_column_of_labels_disturbs_only_readers_of_labels(tmp_path: Path) -> None:
    root = record(tmp_path / "set", range(1))
    path = root / "data/chunk-000/file-000.parquet"
    for index in range((footer := pq.read_metadata(path)).num_columns):
        column = footer.row_group(0).column(index)
        if column.path_in_schema.startswith("language_persistent.list.element.content"):
            place = column.dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[place + 30] ^= 255
    path.write_bytes(content)
    assert len(open_dataset(root)) == 6
    with pytest.raises(EpisodeError, match=r"file-000\.parquet"):
        open_dataset(root, language=True)


def older(root: Path, version: str, index: str, texts: dict[int, Any], numbers: Any) -> Folder:
    """A set with subtask_index; `index` is the name of the column of texts."""
    folder = Folder(root, version, (12, 9), {TOP: "image"})
    info = json.loads((folder.root / "meta/info.json").read_text())
    declared = {"dtype": "int64", "shape": [1], "names": None}
    folder.edit_info(features={**info["features"], "subtask_index": declared})
    parts = [numbers] if version == "v3.0" else [numbers[:12], numbers[12:]]
    for episode, part in enumerate(parts):
        table = pq.read_table(folder.data_path(episode))
        table = table.append_column("subtask_index", pa.array(part))
        pq.write_table(table, folder.data_path(episode))
    if texts:
        table = pa.table({"subtask_index": list(texts), index: list(texts.values())})
        pq.write_table(table, folder.root / "meta/subtasks.parquet")
    return folder


NUMBERS = [3] * 5 + [1] * 7 + [1] * 4 + [0] * 4 + [3]
TEXTS = {0: "lift", 1: "grasp", 3: "reach"}


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("index", ["subtask", "__index_level_0__"])
def test_subtasks_by_number(tmp_path: Path, version: str, index: str) -> None:
    folder = older(tmp_path / "set", version, index, TEXTS, NUMBERS)
    dataset = open_dataset(folder.root, language=True)
    assert all_subtasks(dataset) == [TEXTS[number] for number in NUMBERS]
    assert dataset.subtasks == ("reach", "grasp", "lift")
    assert dataset.select("1").subtasks == ("grasp", "lift", "reach")
    assert dataset[5]["subtask_index"] == 1
    assert check_dataset(folder.root) == []


@pytest.mark.parametrize(
    ("texts", "numbers", "what"),
    [
        ({0: "lift", 3: "reach"}, NUMBERS, "frame 5: subtask_index 1 is not in meta/subtasks"),
        ({**TEXTS, 1: ""}, NUMBERS, "subtask_index 1 has the text ''"),
        ({}, NUMBERS, "there is no meta/subtasks.parquet"),
        (TEXTS, [float(number) for number in NUMBERS], r"subtask_index is float64\[\]"),
        (TEXTS, [str(number) for number in NUMBERS], "subtask_index is object"),
        (TEXTS, [-2] * 21, "frame 0: subtask_index -2 is not in"),
    ],
)
def test_wrong_numbers_of_subtasks(tmp_path: Path, texts: Any, numbers: Any, what: str) -> None:
    folder = older(tmp_path / "set", "v2.1", "subtask", texts, numbers)
    with pytest.raises(EpisodeError, match=what) as error:
        open_dataset(folder.root, language=True)
    assert error.value.episode == 0
    stops = "training with subtasks stops"
    wrong = [one for one in check_dataset(folder.root) if stops in one.consequence]
    assert {one.episode for one in wrong} >= {0}
    assert len(open_dataset(folder.root)) == 21


def test_the_recorder_refuses_labels_that_it_cannot_keep(tmp_path: Path) -> None:
    with Recorder(tmp_path / "plain", 10, FEATURES | CAMERAS) as recorder:
        for labels in ({"subtask": "reach"}, {"questions": [HOW_MANY]}):
            with pytest.raises(FrameError, match="language=True"):
                recorder.add_frame(frame_of(0), "tidy up", **labels)
        assert recorder.num_unsaved_frames == 0
    with Recorder(tmp_path / "set", 10, FEATURES | CAMERAS, language=True) as recorder:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"subtask": "  "}, "subtask must be a sentence"),
            ({"subtask": 5}, "subtask must be a sentence"),
            ({"questions": [HOW_MANY._replace(camera="top")]}, "names the camera 'top'"),
            ({"questions": [HOW_MANY._replace(answer="")]}, "not empty"),
            ({"questions": [tuple(HOW_MANY)]}, "expected a Question"),
            ({"questions": HOW_MANY}, "expected a Question"),
        ]
        for labels, what in cases:
            with pytest.raises(FrameError, match=what):
                recorder.add_frame(frame_of(0), "tidy up", **labels)
        with pytest.raises(FrameError, match="not declared"):
            recorder.add_frame({**frame_of(0), "language_events": []}, "tidy up")
        recorder.add_frame(frame_of(0), "tidy up")
        recorder.add_frame(frame_of(0), "tidy up", subtask="reach")
        for none in (None, ""):
            with pytest.raises(FrameError, match="'reach'"):
                recorder.add_frame(frame_of(0), "tidy up", subtask=none)
        assert recorder.num_unsaved_frames == 2
        recorder.save_episode()
        recorder.add_frame(frame_of(0), "tidy up")  # another episode
        recorder.save_episode()
    dataset = open_dataset(tmp_path / "set", language=True)
    assert all_subtasks(dataset) == ["", "reach", ""]
    with pytest.raises(ValueError, match="language=True"):
        Recorder(
            tmp_path / "x", 10, {**FEATURES, "language_events": {"dtype": "language", "shape": [1]}}
        )


def test_a_set_with_labels_is_continued_with_them(tmp_path: Path, recorded: Path) -> None:
    root = record(tmp_path / "set", range(1))
    with pytest.raises(ValueError, match=r"Continue it with language=True"):
        record(root, range(1), resume=True, language=False)
    record(root, range(1, 2), resume=True)
    with Recorder.open(root) as recorder:
        for step, subtask in enumerate(SUBTASKS[2]):
            questions = QUESTIONS[2].get(step, [])
            recorder.add_frame(frame_of(step + 2), "tidy up", subtask=subtask, questions=questions)
        recorder.save_episode()
    assert files_of(root) == files_of(recorded)
    for name in files_of(recorded):
        if "meta/episodes" not in name:
            assert (root / name).read_bytes() == (recorded / name).read_bytes(), name
    plain = record_plain(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"Continue it with language=False"):
        record(plain, range(1), resume=True)


def record_plain(root: Path) -> Path:
    with Recorder(root, 10, FEATURES) as recorder:
        recorder.add_frame(frame_of(0, {}), "tidy up")
        recorder.save_episode()
    return root


def test_the_columns_are_those_of_lerobot(recorded: Path, tmp_path: Path) -> None:
    """As lerobot 0.6.1 declares them and `datasets` 4.8.5 writes them."""
    info = json.loads((recorded / "meta/info.json").read_text())
    declared = {"dtype": "language", "shape": [1], "names": None}
    assert {key: info["features"][key] for key in language.LANGUAGE} == dict.fromkeys(
        language.LANGUAGE, declared
    )
    assert [*info["features"]][-2:] == ["language_persistent", "language_events"]
    schema = pq.read_schema(recorded / "data/chunk-000/file-000.parquet")
    call = pa.json_() if hasattr(pa, "json_") else pa.string()
    persistent = {
        **dict.fromkeys(("role", "content", "style"), pa.string()),
        "timestamp": pa.float32(),
        "camera": pa.string(),
        "tool_calls": pa.list_(call),
    }
    types = {"language_persistent": persistent, "language_events": bare(persistent, "timestamp")}
    text = {"dtype": "string", "_type": "Value"}
    described = dict.fromkeys(persistent, text) | {
        "timestamp": {"dtype": "float32", "_type": "Value"},
        "tool_calls": {"feature": {"_type": "Json"}, "_type": "List"},
    }
    found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    for key, fields in types.items():
        assert schema.field(key).type.value_type == pa.struct(list(fields.items()))
        expected = {name: described[name] for name in fields}
        assert found[key] == {"feature": expected, "_type": "List"}
        assert list(found[key]["feature"]) == list(fields)

    rows = pq.read_table(recorded / "data/chunk-000/file-000.parquet").to_pylist()
    times = {step: np.float32(step / 10).item() for step in range(6)}
    assert times[4] == rows[4]["timestamp"]
    texts = {2: "reach", 4: "grasp", 5: "reach"}
    cell = [subtask_row(text, times[step]) for step, text in texts.items()]
    assert [row["language_persistent"] for row in rows] == [cell] * 6
    key = lambda row: (row["role"], row["camera"])  # noqa: E731
    for step, row in enumerate(rows):
        assert sorted(row["language_events"], key=key) == vqa_rows(*QUESTIONS[0].get(step, []))
    assert not any(
        "language" in key for key in json.loads((recorded / "meta/stats.json").read_text())
    )
    episodes = pq.read_schema(recorded / "meta/episodes/chunk-000/file-000.parquet").names
    assert not any("language" in name for name in episodes)
    info = json.loads((record_plain(tmp_path / "set") / "meta/info.json").read_text())
    assert not language.LANGUAGE.keys() & info["features"].keys()


def test_converting_keeps_the_labels(recorded: Path, tmp_path: Path) -> None:
    source = as_v21(recorded, tmp_path / "old")
    # A call of a tool, as Arrow infers it, and a style that is not known.
    path = sorted(source.glob("data/*/*.parquet"))[1]
    call = {"type": "function", "function": {"name": "say", "arguments": {"text": "Yes"}}}
    talk = {"role": "assistant", "content": None, "style": None, "camera": None}
    events = pa.array([[{**talk, "tool_calls": [call]}], [], [], []])
    table = pq.read_table(path)
    place = table.column_names.index("language_events")
    pq.write_table(table.set_column(place, "language_events", events), path)
    done = convert_to_v30(source, tmp_path / "new")
    assert (done.num_episodes, done.ignored) == (3, ())
    old, new = (open_dataset(root, language=True) for root in (source, tmp_path / "new"))
    assert all_subtasks(new) == all_subtasks(old) == [text for one in SUBTASKS for text in one]
    assert new.questions == old.questions
    assert sorted(new.questions) == sorted(ASKED)
    cell = pq.read_table(tmp_path / "new/data/chunk-000/file-001.parquet")["language_events"][0]
    [row] = cell.as_py()
    assert [json.loads(one) for one in row.pop("tool_calls")] == [call]
    assert row == talk
    assert check_dataset(tmp_path / "new") == []
    for name in ("file-000", "file-002"):
        path = f"data/chunk-000/{name}.parquet"
        assert pq.read_table(tmp_path / "new" / path)["language_events"].equals(
            pq.read_table(recorded / path)["language_events"]
        )
    assert Recorder.open(tmp_path / "new").num_episodes == 3


def test_what_are_no_labels_is_not_converted(recorded: Path, tmp_path: Path) -> None:
    source = as_v21(recorded, tmp_path / "old")
    path = sorted(source.glob("data/*/*.parquet"))[1]
    table = pq.read_table(path)
    place = table.column_names.index("language_events")
    pq.write_table(table.set_column(place, "language_events", pa.array(["what?"] * 4)), path)
    with pytest.raises(ValueError, match="language_events does not hold rows of labels"):
        convert_to_v30(source, tmp_path / "new")
    done = convert_to_v30(source, tmp_path / "new", skip_broken=True)
    assert list(done.skipped) == ["episode 1"]


def test_converting_keeps_subtasks_by_number(tmp_path: Path) -> None:
    folder = older(tmp_path / "set", "v2.1", "__index_level_0__", TEXTS, NUMBERS)
    convert_to_v30(folder.root, tmp_path / "new")
    dataset = open_dataset(tmp_path / "new", language=True)
    assert all_subtasks(dataset) == [TEXTS[number] for number in NUMBERS]
    assert check_dataset(tmp_path / "new") == []


def test_a_description_mentions_labels(recorded: Path, tmp_path: Path, capsys) -> None:
    text = describe_robot(Metadata.read(recorded), "mine")
    assert "subtasks (language_persistent)" in text
    assert "questions about its pictures (language_events)" in text
    folder = older(tmp_path / "older", "v2.1", "subtask", TEXTS, NUMBERS)
    assert "subtasks (subtask_index)" in describe_robot(Metadata.read(folder.root), "mine")
    plain = Metadata.read(record_plain(tmp_path / "set"))
    assert "subtask" not in describe_robot(plain, "mine")
    assert main(["data", "info", str(recorded)]) == 0
    assert "language_persistent" in capsys.readouterr().out


def test_info_says_that_there_are_labels(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["data", "info", str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "The set declares labels of subtasks (language_persistent)." in shown
    assert "The set declares questions about its pictures (language_events)." in shown

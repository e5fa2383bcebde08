"""Pictures with questions, from a folder and from the labels of a robot data set."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from piston.cli import main
from piston.data import check_dataset, columns, open_dataset
from piston.data.image_text import DatasetQuestions, ImageTextSet
from piston.data.language import Question
from piston.data.record import Recorder

TEXTS = [("What is it?", "a cup"), ("¿Dónde está?", "on the shelf\nabove"), ("How many?", "2")]
KINDS = ["lines", "paths", "bytes", "struct", "struct path"]


def picture(number: int) -> np.ndarray:
    """Each of another size and colour."""
    return np.full((4 + number, 6, 3), (50 * number, 10, 200), np.uint8)


def encoded(number: int) -> bytes:
    data = io.BytesIO()
    PIL.Image.fromarray(picture(number)).save(data, "PNG")
    return data.getvalue()


def make(root: Path, kind: str, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a folder; `rows` replaces the usual ones."""
    (root / "pictures").mkdir(parents=True)
    cells: dict[str, list[Any]] = {"bytes": [], "struct": [], "lines": []}
    for number in range(3):
        name = f"pictures/{number}.png"
        (root / name).write_bytes(encoded(number))
        cells["lines"].append(name)
        cells["bytes"].append(encoded(number))
        cells["struct"].append({"bytes": encoded(number), "path": "elsewhere.png"})
    cells["paths"] = cells["lines"]
    cells["struct path"] = [{"bytes": None, "path": name} for name in cells["lines"]]
    if rows is None:
        pairs = zip(cells[kind], TEXTS)
        rows = [{"image": cell, "question": q, "answer": a, "id": 7} for cell, (q, a) in pairs]
    if kind == "lines":
        (root / "all.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    else:
        table = pa.Table.from_pylist(rows)
        if kind == "struct path":
            cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            table = table.set_column(0, "image", table["image"].cast(cell))
        pq.write_table(table, root / "all.parquet", row_group_size=2)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_table(tmp_path: Path, kind: str) -> None:
    opened = ImageTextSet(make(tmp_path / "set", kind))
    for pairs in (opened, pickle.loads(pickle.dumps(opened))):
        assert len(pairs) == 3
        for number, item in enumerate(pairs):
            assert set(item) == {"image", "question", "answer"}
            np.testing.assert_array_equal(item["image"], picture(number))
            assert item["image"].dtype == np.uint8
            assert (item["question"], item["answer"]) == TEXTS[number]
        assert pairs[-1]["answer"] == "2"
        with pytest.raises(IndexError, match="no row 3"):
            pairs[3]


def test_images_in_the_table_are_not_kept_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(columns, "_MAX_BYTES", 0)
    opened = ImageTextSet(make(tmp_path / "set", "bytes"))
    [item for _ in range(2) for item in opened]
    assert encoded(2) not in pickle.dumps(opened)
    shared: list[pickle.PickleBuffer] = []
    small = pickle.dumps(opened, protocol=5, buffer_callback=shared.append)
    assert b"shelf" not in small  # texts are in memory that processes share
    assert all(buffer.raw().readonly for buffer in shared)


def row(**changes: Any) -> dict[str, Any]:
    return {"image": "pictures/0.png", "question": "What is it?", "answer": "a cup", **changes}


WRONG: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("lines", [row(), row(question=" ")], ["row 1", "question is ' '"]),
    ("paths", [row(), row(answer="")], ["row 1", "answer is ''"]),
    ("paths", [row(), row(answer=None)], ["row 1", "answer is None"]),
    ("paths", [row(image="")], ["row 0", "image is ''"]),
    ("lines", [row(), row(answer=None)], ["row 1", "answer is 'None'"]),
    ("lines", [row(answer=3)], ["row 0", "answer is '3', expected a text"]),
    ("paths", [row(answer=3)], ["answer is of type int64"]),
    ("paths", [row(image=3)], ["image is of type int64"]),
    ("lines", [row(), {"image": "x", "Question": "a", "answer": "b"}], ["row 1", "'Question'?"]),
    ("paths", [{"image": "x", "question": "a", "answers": "b"}], ["no 'answer'", "'answers'?"]),
    ("lines", [], ["has no rows"]),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_tables(tmp_path: Path, case: int) -> None:
    kind, rows, parts = WRONG[case]
    root = make(tmp_path / "set", kind, rows)
    with pytest.raises(ValueError, match="all") as error:
        ImageTextSet(root)
    for part in (str(root), *parts):
        assert part in str(error.value)


def test_exactly_one_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        ImageTextSet(tmp_path / "set")
    root = make(tmp_path / "set", "lines")
    (root / ".all.jsonl.tmp").touch()
    (root / ".hidden.jsonl").touch()
    assert len(ImageTextSet(root)) == 3
    (root / "more.parquet").touch()
    with pytest.raises(ValueError, match=r"exactly one table.*found all\.jsonl, more\.parquet"):
        ImageTextSet(root)
    (root / "all.jsonl").unlink()
    with pytest.raises(ValueError, match=r"more\.parquet cannot be read"):
        ImageTextSet(root)
    (root / "more.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="exactly one table.*found none"):
        ImageTextSet(root)
    (root / "all.jsonl").write_text('{"image"')
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        ImageTextSet(root)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_cannot_be_decoded(tmp_path: Path, kind: str) -> None:
    bad: Any = {"lines": "pictures/9.png", "paths": "../9.png", "bytes": b"nothing"}.get(kind)
    if kind == "struct":
        bad = {"bytes": b"nothing", "path": "9.png"}
    if kind == "struct path":
        bad = {"bytes": None, "path": "/9.png"}
    good = ImageTextSet(make(tmp_path / "good", kind))
    source = tmp_path / "good" / ("all.jsonl" if kind == "lines" else "all.parquet")
    rows = (
        [json.loads(line) for line in source.read_text().split("\n\n")]
        if kind == "lines"
        else pq.read_table(source).to_pylist()
    )
    rows[1]["image"] = bad
    (tmp_path / "9.png").write_bytes(encoded(0))  # exists, but outside
    opened = ImageTextSet(make(tmp_path / "set", kind, rows))
    np.testing.assert_array_equal(opened[0]["image"], good[0]["image"])
    with pytest.raises(ValueError, match="row 1: the image") as error:
        opened[1]
    assert str(tmp_path / "set") in str(error.value)
    if "path" in kind:
        assert "leads outside" in str(error.value)


def test_questions_of_a_robot_data_set(tmp_path: Path) -> None:
    camera, shape = "observation.images.top", (8, 8, 3)
    features = {
        camera: {"dtype": "image", "shape": shape},
        "action": {"dtype": "float32", "shape": (2,)},
    }
    with Recorder(tmp_path / "set", 10, features, language=True) as recorder:
        for episode in range(2):
            for step in range(3):
                image = np.full(shape, 40 * episode + 9 * step + 50, np.uint8)
                asked = [Question(camera, f"{episode}?", str(step))] if step else []
                frame = {camera: image, "action": np.zeros(2, np.float32)}
                recorder.add_frame(frame, "look", questions=asked)
            recorder.save_episode()
    dataset = open_dataset(tmp_path / "set", language=True)
    found = pickle.loads(pickle.dumps(DatasetQuestions(dataset)))
    seen = [(int(x["image"].mean()), x["question"], x["answer"]) for x in found]
    expected = [(59, "0?", "1"), (68, "0?", "2"), (99, "1?", "1"), (108, "1?", "2")]
    assert seen == expected
    assert found[0]["image"].shape == shape
    assert len(found) == 4
    later = DatasetQuestions(dataset.select("1"))
    assert [(int(x["image"].mean()), x["question"], x["answer"]) for x in later] == expected[2:]
    assert len(DatasetQuestions(dataset.select(cameras=()))) == 0
    with pytest.raises(ValueError, match="language=True"):
        DatasetQuestions(open_dataset(tmp_path / "set"))


def test_the_check_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    for kind in KINDS:
        root = make(tmp_path / kind, kind)
        assert check_dataset(root, progress=lambda *numbers: seen.append(numbers)) == []
        assert seen.pop() == (3, 3)
        assert main(["data", "check", str(root)]) == 0
        assert "3 of 3 pictures with questions; no problems: training can use" in (
            capsys.readouterr().out
        )


def test_the_check_finds_every_row_that_is_wrong(tmp_path: Path, capsys) -> None:
    rows = [row(), row(answer=""), row(image="pictures/9.png"), row(question="\t"), row(), row()]
    rows[5] = row(image="black.png")
    root = make(tmp_path / "set", "paths", rows)
    (root / "pictures/0.png").write_bytes(encoded(1))  # of row 4 too
    PIL.Image.fromarray(np.full((4, 4, 3), 10, np.uint8)).save(root / "black.png")
    problems = check_dataset(root)
    found = [(one.severity, one.where, one.what) for one in problems]
    assert sorted(found[:3]) == [
        ("error", "row 1", "answer is '', expected a text that is not empty"),
        (
            "error",
            "row 2",
            "the image pictures/9.png cannot be read: No such file or directory",
        ),
        ("error", "row 3", "question is '\\t', expected a text that is not empty"),
    ]
    assert found[3:] == [("warning", "row 5", "the picture is black")]
    assert main(["data", "check", str(root)]) == 1
    shown = capsys.readouterr().out
    assert "complete the row or remove it" in shown
    counted = "3 of 6 pictures with questions; 3 errors, 1 warning: training cannot use it"
    assert counted in shown


def test_the_check_of_a_table_that_cannot_be_read(tmp_path: Path, capsys) -> None:
    root = make(tmp_path / "set", "lines", [row(answer=3)])
    assert main(["data", "check", str(root)]) == 1
    shown = capsys.readouterr().out
    assert "answer is '3', expected a text" in shown
    assert "pictures with questions; 1 error: training cannot use it" in shown
    (root / "all.jsonl").unlink()
    assert main(["data", "check", str(root)]) == 1
    assert "is not a LeRobot data set" in capsys.readouterr().err


def test_info_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "set", "bytes")
    assert main(["data", "info", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "3 pictures with questions" in shown
    assert "What is it?" in shown
    assert "a cup" in shown

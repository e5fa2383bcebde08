"""What the page is made from: evaluations, stages and metrics read back as they were written."""

import json

import numpy as np
import pytest
from PIL import Image

from piston.report import evaluation
from piston.report.training import read_run
from piston.sim.scores import read_evaluation
from piston.stages import Stages, read_stages

from . import cases


def test_an_evaluation_is_read_back(tmp_path):
    written = cases.write_evaluation(tmp_path / "eval")
    found = read_evaluation(tmp_path / "eval")
    assert found.outcomes == written.outcomes
    np.testing.assert_array_equal(found.trace.chunks, written.trace.chunks)
    np.testing.assert_array_equal(found.trace.executed, written.trace.executed)
    assert (found.trace.starts, found.trace.names) == (written.trace.starts, written.trace.names)
    assert str(found.success) == str(written.success)
    assert str(found.held) == str(written.held)
    assert found.latency_ms["p50"] == pytest.approx(20)
    assert {p: len(o) for p, o in found.by_prompt.items()} == {"wave <both> arms": 3}


def test_videos_are_in_the_order_of_their_numbers(tmp_path):
    cases.write_evaluation(tmp_path)
    results = tmp_path / "results.json"
    summary = json.loads(results.read_text())
    summary["videos"] += ["videos/success_seed10.mp4", "videos/success_seed9.mp4"]
    results.write_text(json.dumps(summary))
    # One that another evaluation left there.
    (tmp_path / "videos" / "success_seed77.mp4").write_bytes(b"")
    names = [path.stem for path in read_evaluation(tmp_path).videos]
    assert names == ["failure_seed2", "success_seed0", "success_seed9", "success_seed10"]


def test_an_animation_shows_every_video_and_stays_small(tmp_path, monkeypatch):
    cases.write_evaluation(tmp_path / "eval")
    result = read_evaluation(tmp_path / "eval")
    evaluation.write_animation(tmp_path / "a.webp", [result])
    with Image.open(tmp_path / "a.webp") as film:
        assert film.n_frames == 13  # every second of 25
        assert film.width == 2 * 240
        first = np.asarray(film.convert("RGB")).astype(int)
    # The failure comes first and begins bright, the success begins dark; each in its colour.
    assert first[90, 120].min() > 200
    assert first[90, 360].max() < 40
    assert first[1, 120, 0] > first[1, 120, 1] + 50
    assert first[1, 360, 1] > first[1, 360, 0] + 50

    monkeypatch.setattr(evaluation, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10"):
        evaluation.write_animation(tmp_path / "b.webp", [result])
    with pytest.raises(ValueError, match="piston eval … --video"):
        evaluation.write_animation(tmp_path / "c.webp", [])


def test_a_video_belongs_to_an_episode(tmp_path):
    cases.write_evaluation(tmp_path)
    result = read_evaluation(tmp_path)
    assert result.outcome_of(result.videos[0]).seed == 2
    with pytest.raises(ValueError, match="belongs to no episode"):
        result.outcome_of(tmp_path / "success_seed77.mp4")


def test_stages_are_read_back_and_replaced_when_done_again(tmp_path):
    stages = Stages({"demo": "aloha"}, peak_memory_bytes=30)
    stages.add("record", 1.5, "ok")
    stages.add("train", 9.0, "ok")
    stages.add("record", 2.5, "again")
    stages.write(tmp_path / "stages.json")
    found = read_stages(tmp_path / "stages.json")
    assert found == stages
    assert found.get("record") == {"name": "record", "seconds": 2.5, "result": "again"}
    assert found.get("serve") is None
    assert found.peak_memory_bytes == 30


def test_curves_and_seconds(run, tmp_path):
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    lines = [
        {"step": 0, "loss": 2.0, "samples_per_second": 1.0},
        {"step": 4, "loss": 1.0, "samples_per_second": 4.0},
        {"step": 4, "validation/loss": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read_run(tmp_path)
    np.testing.assert_array_equal(found.curve("loss"), [[0, 4], [2, 1]])
    np.testing.assert_array_equal(found.curve("validation/loss"), [[4], [1.5]])
    assert found.curve("nothing")[0].shape == (0,)
    # One step of two samples at 1 per second, then four at 4 per second.
    assert found.training_seconds == pytest.approx(2 + 4 * 2 / 4)
    assert found.checkpoint is None

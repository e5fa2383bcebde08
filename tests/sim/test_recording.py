"""Recording: what is kept, in which order, and what happens after a stop."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")

from piston.cli import main
from piston.data import check_dataset, open_dataset
from piston.data.record.writer import RECORDING
from piston.sim import RECORDING_SEEDS, make_environment, make_expert, recording
from piston.sim.recording import LOG, Recording, record

# The shortest demonstrations there are.
QUICK = Recording("metaworld:drawer-close-halfway", pixels=16)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Four episodes, in one go, by one process."""
    folder = tmp_path_factory.mktemp("recorded") / "set"
    record(QUICK, 4, folder, workers=1)
    return folder


def _tried(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def _assert_same_set(one, other):
    a, b = open_dataset(one, language=True), open_dataset(other, language=True)
    assert len(a) == len(b)
    assert a.questions == b.questions
    assert [x["subtask"] for x in a] == [x["subtask"] for x in b]
    np.testing.assert_array_equal(a.episode_bounds, b.episode_bounds)
    for key in ("action", "observation.state", "episode_index"):
        np.testing.assert_array_equal(a.column(key), b.column(key))
    for index in (0, len(a) // 2, len(a) - 1):
        np.testing.assert_array_equal(
            a[index]["observation.images.corner4"], b[index]["observation.images.corner4"]
        )
    assert _tried(one) == _tried(other)


def test_the_set_is_a_lerobot_set(recorded):
    assert [problem for problem in check_dataset(recorded) if problem.severity == "error"] == []
    data = open_dataset(recorded)
    assert data.metadata.version == "v3.0"
    assert data.metadata.fps == 40
    assert len(data.metadata.episodes) == 4
    first = data[0]
    assert first["task"] == "close the drawer"
    environment = make_environment(QUICK.task, pixels=16)
    start = environment.reset(_tried(recorded)[1]["seed"])
    np.testing.assert_array_equal(first["observation.state"], start["state"])
    image = first["observation.images.corner4"].astype(float)
    assert np.abs(image - start["images"]["corner4"]).mean() < 12  # compressed
    environment.close()


def test_labels_are_given_back_frame_by_frame(recorded):
    data = open_dataset(recorded, language=True)
    environment, expert = make_environment(QUICK.task, pixels=16), make_expert(QUICK.task)
    seeds = [line["seed"] for line in _tried(recorded)[1:] if line["success"]]
    frames = [x for seed in seeds for x in recording.demonstrate(environment, expert, seed).frames]
    assert [item["subtask"] for item in data] == [frame.subtask for frame in frames]
    assert set(data.subtasks) == {"reach for the handle", "push the drawer shut"}
    asked = [
        (index, question) for index, frame in enumerate(frames) for question in frame.questions
    ]
    assert list(data.questions) == asked
    environment.close()


def test_questions_are_about_both_ends_and_not_repeated_soon():
    environment, expert = make_environment(QUICK.task, pixels=16), make_expert(QUICK.task)
    frames = recording.demonstrate(environment, expert, RECORDING_SEEDS).frames
    asked = [(i, x.question, x.answer) for i, frame in enumerate(frames) for x in frame.questions]
    drawer = [(i, answer) for i, question, answer in asked if question == "is the drawer open?"]
    assert [answer for _, answer in drawer] == ["half open", "no"]
    assert drawer[0][0] == 0
    assert drawer[1][0] >= len(frames) - 5
    environment.close()


def test_a_set_without_labels_is_refused(recorded):
    log = recorded / LOG
    before = log.read_text()
    header, *lines = _tried(recorded)
    del header["labels"]
    try:
        log.write_text("".join(json.dumps(x) + "\n" for x in (header, *lines)))
        with pytest.raises(ValueError, match=r"another version of Piston.* Choose another folder"):
            record(QUICK, 5, recorded, workers=1)
    finally:
        log.write_text(before)
    assert len(open_dataset(recorded).metadata.episodes) == 4


def test_a_task_without_labels_is_recorded(tmp_path):
    record(Recording("metaworld:door-close", pixels=16), 1, tmp_path / "set", workers=1)
    data = open_dataset(tmp_path / "set", language=True)
    assert data.subtasks == ()
    assert data[0]["subtask"] == ""
    assert {x.question for _, x in data.questions} == {"where is the hand?", "is the gripper open?"}


def test_the_number_of_workers_does_not_matter(recorded, tmp_path, monkeypatch):
    given, submit = [], recording.ProcessPoolExecutor.submit

    def counted(pool, work, seed):
        given.append(seed)
        return submit(pool, work, seed)

    monkeypatch.setattr(recording.ProcessPoolExecutor, "submit", counted)
    record(QUICK, 4, tmp_path / "set", workers=2)
    _assert_same_set(recorded, tmp_path / "set")
    # No worker simulated an episode that nobody needs.
    assert given == [line["seed"] for line in _tried(tmp_path / "set")[1:]]


def test_a_second_run_goes_on_where_the_first_stopped(recorded, tmp_path):
    record(QUICK, 1, tmp_path / "set", workers=1)
    record(QUICK, 3, tmp_path / "set", workers=1)
    result = record(QUICK, 4, tmp_path / "set", workers=1)
    _assert_same_set(recorded, tmp_path / "set")
    assert record(QUICK, 4, tmp_path / "set", workers=1) == result


def test_an_episode_that_was_saved_but_not_noted_is_not_saved_twice(recorded, tmp_path):
    record(QUICK, 2, tmp_path / "set", workers=1)
    log = tmp_path / "set" / LOG
    lines = log.read_text().splitlines(keepends=True)
    # Stopped in the middle of noting the second success.
    log.write_text("".join(lines[:-1]) + lines[-1][:9])
    record(QUICK, 4, tmp_path / "set", workers=1)
    _assert_same_set(recorded, tmp_path / "set")


def test_failures_are_noted_but_not_kept(tmp_path, monkeypatch):
    honest = recording.demonstrate

    def fails_at_even_seeds(environment, expert, seed):
        episode = honest(environment, expert, seed)
        return episode if seed % 2 else recording.Episode(seed, success=False)

    monkeypatch.setattr(recording, "demonstrate", fails_at_even_seeds)
    assert record(QUICK, 2, tmp_path / "set", workers=1) == (2, 4)
    assert [line["success"] for line in _tried(tmp_path / "set")[1:]] == [False, True] * 2
    assert len(open_dataset(tmp_path / "set").metadata.episodes) == 2


def test_an_expert_that_never_succeeds_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(
        recording, "demonstrate", lambda *arguments: recording.Episode(arguments[-1], False)
    )
    with pytest.raises(ValueError, match="Only 0 of 30 tries succeeded"):
        record(QUICK, 2, tmp_path / "set", workers=1)


@pytest.mark.parametrize(
    "other",
    [Recording(QUICK.task, seed=1, pixels=16), Recording("metaworld:door-close", pixels=16)],
)
def test_another_recording_is_not_mixed_in(recorded, other):
    with pytest.raises(ValueError, match="Choose another folder"):
        record(other, 5, recorded, workers=1)
    assert len(open_dataset(recorded).metadata.episodes) == 4


def test_recordings_share_no_start_with_one_another_nor_with_evaluation():
    firsts = [Recording(QUICK.task, seed).first_seed for seed in range(3)]
    assert firsts == [RECORDING_SEEDS, 2 * RECORDING_SEEDS, 3 * RECORDING_SEEDS]
    with pytest.raises(ValueError, match="found -1"):
        Recording(QUICK.task, -1)


def test_aloha_is_recorded_under_the_names_that_its_presets_read(tmp_path, capsys):
    arguments = ["record", "aloha_transfer_cube", "--episodes", "1", "--pixels", "16"]
    assert main([*arguments, "--out", str(tmp_path / "set"), "--workers", "1"]) == 0
    assert "holds 1 episode of aloha_transfer_cube" in capsys.readouterr().out
    data = open_dataset(tmp_path / "set")
    assert data[0]["observation.images.top"].shape == (16, 16, 3)
    assert data[0]["task"] == "Transfer cube"
    assert data.column("action").shape[1] == data.column("observation.state").shape[1] == 14
    assert data.metadata.fps == 50


def test_a_set_that_holds_more_than_asked_for_is_counted(recorded, capsys):
    arguments = ["record", QUICK.task, "--episodes", "3", "--pixels", "16", "--workers", "1"]
    assert main([*arguments, "--out", str(recorded)]) == 0
    assert "holds 4 episodes of metaworld:drawer-close-halfway" in capsys.readouterr().out


def test_the_environments_own_pixels_may_be_given_as_a_number(tmp_path):
    own = make_environment(QUICK.task).pixels
    implied, given = Recording(QUICK.task), Recording(QUICK.task, pixels=own)
    record(implied, 1, tmp_path / "set", workers=1)
    assert _tried(tmp_path / "set")[0]["pixels"] == own
    assert record(given, 1, tmp_path / "set", workers=1).num_episodes == 1
    with pytest.raises(ValueError, match="does not fit this recording"):
        record(QUICK, 1, tmp_path / "set", workers=1)


def test_a_set_keeps_its_codec(recorded):
    before = _tried(recorded)
    with pytest.raises(ValueError, match="are h264, but --codec is av1. Continue with"):
        record(QUICK, 5, recorded, workers=1, codec="av1")
    assert _tried(recorded) == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_no_worker_outlives_the_command(tmp_path, number, code, wait_until, is_alive, process_tree):
    folder = tmp_path / "set"
    words = ["record", QUICK.task, "--episodes", "500", "--pixels", "16", "--workers", "2"]
    command = [sys.executable, "-m", "piston.cli", *words, "--out", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(
                lambda: process.poll() or ((folder / LOG).exists() and len(_tried(folder)) > 2)
            )
            below = set(process_tree(process.pid)) - {process.pid}
            assert len(below) >= 2, process.poll()
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()
    wait_until(lambda: not any(map(is_alive, below)))
    if number != signal.SIGKILL:
        assert not (folder / RECORDING).exists()  # closed, nothing half done is left
        assert [p for p in check_dataset(folder) if p.severity == "error"] == []
    num_episodes = len(open_dataset(folder).metadata.episodes)
    assert record(QUICK, num_episodes + 1, folder, workers=1).num_episodes == num_episodes + 1


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    arguments = ["record", "aloha_transfercube", "--episodes", "1", "--out", str(tmp_path / "set")]
    assert main(arguments) == 1
    assert "Did you mean 'aloha_transfer_cube'?" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()

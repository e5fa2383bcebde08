"""A recorder that dies at any moment loses the unfinished episode and nothing else."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piston.data.metadata import Metadata
from piston.data.record import Recorder

from .recording_cases import VIDEO, check_set, files_of, record, small_recorder


class Snapshots:
    """Copies the set before every change of a name: what a process that dies there leaves."""

    def __init__(self, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.folder = root, folder
        self.acknowledged: list[int] = []  # per snapshot, the episodes that had been saved by then
        self.saved = 0
        for owner, name in [(Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (os, "link")]:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function):
        def watched(path, *args, **kwargs):
            if Path(path).exists():
                self.take()
            return function(path, *args, **kwargs)

        return watched

    def take(self) -> None:
        if self.root.exists():
            shutil.copytree(self.root, self.folder / str(len(self.acknowledged)))
            self.acknowledged.append(self.saved)


def test_death_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only power cuts need it, and it is slow
    root = tmp_path / "set"
    with pytest.MonkeyPatch.context() as patches:
        snapshots = Snapshots(root, tmp_path, patches)
        # The second recorder continues what the first has finalized.
        for episodes in (range(1), range(1, 4)):
            recorder = small_recorder(root)
            for episode in episodes:
                record(recorder, episode)
                snapshots.saved = episode + 1
            recorder.finalize()
    assert len(snapshots.acknowledged) > 20
    for number, saved in enumerate(snapshots.acknowledged):
        dead = tmp_path / str(number)
        # As a reader finds it, before anything is repaired. (A set without episodes has no reader.)
        found = check_set(dead) if saved else 0
        assert found >= saved
        # As the next recorder finds it.
        recorder = small_recorder(dead)
        assert max(saved, found) <= recorder.num_episodes <= saved + 1
        record(recorder, recorder.num_episodes)
        count = recorder.num_episodes
        recorder.finalize()
        assert check_set(dead) == count
        assert leftovers(dead) == []


def leftovers(root: Path) -> list[str]:
    """Files that a finished set should not have: temporary ones and those without an episode."""
    used = {"meta/info.json", "meta/piston.json", "meta/stats.json", "meta/tasks.parquet"}
    used |= {str(path.relative_to(root)) for path in root.glob("meta/episodes/*/*.parquet")}
    for episode in Metadata.read(root).episodes:
        used |= {episode.data_path, *(span.path for span in episode.videos.values())}
    return sorted(set(files_of(root)) ^ used)


def test_kill_9(tmp_path: Path) -> None:
    root = tmp_path / "set"
    generator = random.Random(0)
    known = 0
    for _ in range(6):
        command = [sys.executable, "recording_cases.py", str(root)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
        )
        assert process.stdout is not None
        assert int(process.stdout.readline()) >= known
        acknowledged = [process.stdout.readline() for _ in range(generator.randint(1, 6))]
        try:
            process.wait(timeout=generator.uniform(0, 0.05))  # somewhere inside the next episode
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].splitlines()
        known = max(int(line) for line in [*acknowledged, *rest] if line.strip())
        assert check_set(root) >= known
    recorder = Recorder.open(root, codec="h264")
    assert recorder.num_episodes >= known
    record(recorder, recorder.num_episodes)
    count = recorder.num_episodes
    recorder.finalize()
    assert check_set(root) == count
    assert leftovers(root) == []


def test_two_recorders_at_once(tmp_path: Path) -> None:
    with (
        small_recorder(tmp_path / "set"),
        pytest.raises(RuntimeError, match="another process is recording"),
    ):
        _ = small_recorder(tmp_path / "set").num_episodes


def move_back(root: Path, stream: str, episode: int, chunk: int) -> list[tuple[str, int, int]]:
    """Copy an episode's file to another chunk, where no episode refers to it."""
    folder = root / ("data" if stream == "data" else f"videos/{stream}")
    [path] = folder.glob(f"chunk-000/file-{episode:03d}.*")
    copy = folder / f"chunk-{chunk:03d}/{path.name}"
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, copy)
    return [(stream, chunk, episode)]


def test_files_that_are_not_its_own_are_never_deleted(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with small_recorder(root) as recorder:
        record(recorder, 0)
    strangers = ["notes.txt", ".hidden", "data/chunk-007/file-007.parquet", "meta/episodes/x.tmp"]
    for name in strangers:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    (root / "meta/.info.json.tmp").write_text("cut o")  # of a writer that was killed
    with small_recorder(root) as recorder:
        record(recorder, 1)
    assert check_set(root) == 2
    assert all((root / name).read_text() == "mine" for name in strangers)
    assert leftovers(root) == sorted(strangers)
    # Nor are they overwritten, which shows before anything is recorded.
    (root / "data/chunk-000/file-002.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match="no episode of the set refers to it"):
        _ = small_recorder(root).num_episodes
    assert (root / "data/chunk-000/file-002.parquet").read_text() == "mine"


def test_what_version_0_1_0_was_joining_when_it_was_killed_is_removed(tmp_path: Path) -> None:
    """It joined episodes into new files; until the rows named them, only its list did."""
    root = tmp_path / "set"
    with small_recorder(root) as recorder:
        for episode in range(2):
            record(recorder, episode)
    listed = [*move_back(root, "data", 1, 3), *move_back(root, VIDEO, 1, 3)]
    listed += [("data", 0, 1)]  # this one is in use by now
    (root / ".recording").mkdir()
    (root / ".recording/joining.json").write_text(json.dumps(listed))
    (root / ".recording/camera-0.mp4").write_text("cut o")
    with small_recorder(root) as recorder:
        record(recorder, 2)
    assert check_set(root) == 3
    assert leftovers(root) == []

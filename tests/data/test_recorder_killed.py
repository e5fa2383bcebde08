"""A recorder that dies at any moment loses the unfinished episode and nothing else."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piston.data.recorder import Recorder

from .recording_cases import check_set, record, tiny_recorder

VERSIONS = ["v3.0", "v2.1"]


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


@pytest.mark.parametrize("version", VERSIONS)
def test_death_at_every_step(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only power cuts need it, and it is slow
    root = tmp_path / "set"
    with pytest.MonkeyPatch.context() as patches:
        snapshots = Snapshots(root, tmp_path, patches)
        # The second recorder continues what the first has finalized.
        for episodes in (range(1), range(1, 4)):
            recorder = tiny_recorder(root, version)
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
        recorder = tiny_recorder(dead, version)
        assert max(saved, found) <= recorder.num_episodes <= saved + 1
        record(recorder, recorder.num_episodes)
        count = recorder.num_episodes
        recorder.finalize()
        assert check_set(dead) == count
        assert leftovers(dead) == []


def leftovers(root: Path) -> list[str]:
    """Files that a finished set should not have."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.name.startswith(".") or "chunk-999" in str(path)
    ]


@pytest.mark.parametrize(("version", "kills"), [("v3.0", 4), ("v2.1", 2)])
def test_kill_9(tmp_path: Path, version: str, kills: int) -> None:
    root = tmp_path / "set"
    generator = random.Random(version)
    known = 0
    for _ in range(kills):
        command = [sys.executable, "recording_cases.py", str(root), version]
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
        tiny_recorder(tmp_path / "set", "v3.0"),
        pytest.raises(RuntimeError, match="another process is recording"),
    ):
        _ = tiny_recorder(tmp_path / "set", "v3.0").num_episodes

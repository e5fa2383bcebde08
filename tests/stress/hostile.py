"""Files made to do harm, and downloads that break off: nothing outside is read, changed or run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.data.recording_cases import FEATURES, FPS, as_v21, record
from tests.test_assets import CONTENT, OTHER, Server
from tests.training.running import tiny
from tests.training.test_step import make_trainer

from files import REFERENCE, read_set
from piston import assets
from piston.data.convert import convert_to_v30
from piston.data.record import Recorder
from piston.files import write_manifest
from piston.inference import load_policy
from piston.progress import Progress
from piston.training.checkpoint import restore
from piston.training.loop import train_loop
from rows import Part, Row, quiet

_AT_ONCE = 16  # downloads
_OUTSIDE = ["../", "../../", "data/../../", "./../", "{root}/", "videos/../../outside/../"]


def _content(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


class _Harmful:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Site:
    """A folder with good inputs, and one with a file that nothing may touch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outside = folder, folder / "outside"
        with Recorder(folder / "good", FPS, FEATURES, "arm", "h264") as recorder:
            for episode in range(2):
                record(recorder, episode)
        as_v21(folder / "good", folder / "good21")
        shutil.copytree(REFERENCE / "checkpoints_0.1.0" / "pi0_aloha", folder / "policy")
        self.state = train_loop(tiny(folder / "runs", num_train_steps=2, save_interval=5))
        # Without the harm they are read: what is refused below is refused because of it.
        assert read_set(folder / "good") == read_set(folder / "good21")
        load_policy(folder / "policy")
        restore(make_trainer(), self.state)
        self.outside.mkdir()
        for name in ("witness", "episode_000000.parquet", "file-000.parquet", "file-000.mp4"):
            (self.outside / name).write_text("untouched")
        (self.outside / "evil.py").write_text(
            f"from pathlib import Path; Path({str(self.outside / 'executed')!r}).touch()"
        )

    def info_path(self, rng: random.Random) -> None:
        """A template that leads outside, then: read, go on recording, convert."""
        root = self.folder / "tried" / "set"
        shutil.copytree(self.folder / rng.choice(["good", "good21"]), root)
        info = json.loads((root / "meta/info.json").read_text())
        field = rng.choice(["data_path", "video_path"])
        start = rng.choice(_OUTSIDE).replace("{root}", str(self.outside))
        name = rng.choice([info[field], "outside/witness", "../outside/file-{file_index:03d}.mp4"])
        info[field] = start + name
        (root / "meta/info.json").write_text(json.dumps(info))
        for attempt in (
            lambda: read_set(root),
            lambda: _record_on(root),
            lambda: convert_to_v30(root, self.folder / "tried" / "converted"),
        ):
            with suppress(ValueError, OSError):
                attempt()

    def overwrite(self, rng: random.Random) -> None:
        """A target that contains the source, or that is no data set."""
        target = self.folder / "tried" / "target"
        shutil.copytree(self.folder / "good21", target / "inside")
        shutil.copytree(self.outside, target / "documents")
        source = rng.choice([target / "inside", self.folder / "good21"])
        before = _content(target)
        with suppress(ValueError, OSError):
            convert_to_v30(source, target, overwrite=True)
        if _content(target) != before:
            (self.outside / "witness").write_text("the target of a conversion was replaced")

    def config(self, rng: random.Random) -> None:
        """A module's name as the type of one of the configurations in config.json."""
        policy = self.folder / "tried" / "policy"
        shutil.copytree(self.folder / "policy", policy, copy_function=shutil.copyfile)
        config = json.loads((policy / "config.json").read_text())
        places = [one for one in _objects(config) if "type" in one]
        rng.choice(places)["type"] = rng.choice(["evil:Config", "evil", "os:system", "evil.Config"])
        (policy / "config.json").write_text(json.dumps(config))
        shutil.copy(self.outside / "evil.py", policy)
        with suppress(ValueError, OSError):
            load_policy(policy)

    def metadata(self, rng: random.Random) -> None:
        """A training state whose description is a pickle that calls a function."""
        state = self.folder / "tried" / "state"
        shutil.copytree(self.state, state)
        target = self.outside / "executed"
        calls: list[tuple[Any, ...]] = [(os.system, f"touch {target}"), (os.mkdir, str(target))]
        calls += [(eval, f"open({str(target)!r}, 'w')"), (exec, f"open({str(target)!r}, 'w')")]
        calls += [(Path.touch, target), (shutil.rmtree, str(self.outside))]
        content = pickle.dumps(_Harmful(*rng.choice(calls)), protocol=rng.randrange(6))
        (state / "train_state" / ".metadata").write_bytes(content)
        write_manifest(state)
        with suppress(ValueError, OSError):
            restore(make_trainer(), state)


def _record_on(root: Path) -> None:
    with Recorder.open(root, codec="h264") as recorder:
        record(recorder, 0)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _objects(inner)


def hostile(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Read hostile files; the folder outside must stay as it is."""
    rng, began, counts, harmed = random.Random(seed), time.monotonic(), Counter[str](), []
    tracebacks: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, quiet():
        site = _Site(Path(temporary))
        before = _content(site.outside)
        sys.path.append(str(site.outside))  # evil.py could be imported
        attempts = [site.info_path, site.overwrite, site.config, site.metadata]
        while time.monotonic() - began < seconds:
            attempt = attempts[sum(counts.values()) % len(attempts)]
            try:
                attempt(rng)
            except Exception as error:
                tracebacks.append(f"{attempt.__name__}: {type(error).__name__}: {error}")
            counts[attempt.__name__] += 1
            shutil.rmtree(site.folder / "tried")
            if _content(site.outside) != before or "evil" in sys.modules:
                harmed.append(attempt.__name__)
                break
            progress(round(time.monotonic() - began), None, f"{sum(counts.values())} files")
        sys.path.remove(str(site.outside))
    count, found = sum(counts.values()), ", ".join(harmed) or "0"
    return [
        Row("hostile files: executed, changed or deleted outside", count, found, "0", not harmed),
        Row("  tracebacks", count, "; ".join(tracebacks[:2]) or "0", "0", not tracebacks),
    ]


def downloads(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Servers that break off, change their content or tell no size; never a wrong file."""
    rng, began, counts = random.Random(seed), time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as temporary, quiet():
        os.environ["PISTON_HOME"], home = temporary, os.environ.get("PISTON_HOME")
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # most of their time is waiting before a retry
            while time.monotonic() - began < seconds:
                seeds = [rng.random() for _ in range(_AT_ONCE)]
                counts.update(pool.map(_download, seeds))
                progress(round(time.monotonic() - began), None, f"{counts.total()} downloads")
        os.environ.pop("PISTON_HOME") if home is None else os.environ.update(PISTON_HOME=home)
    wrong = counts["wrong"]
    found = f"{counts['complete']} complete, {counts['error']} errors, {wrong} wrong"
    ok = wrong == 0 and counts["complete"] > 0
    return [Row("downloads cut off or changed", counts.total(), found, "0 wrong", ok)]


def _download(seed: float) -> str:
    rng, server = random.Random(seed), Server()
    server.length = rng.choice(["plain", "chunked", "close"])
    # Without ranges and without a length nobody can know that a file is cut off: the log says so.
    server.ranges = server.length == "close" or rng.random() < 0.7
    server.etag = rng.random() < 0.7
    for number in range(rng.randint(1, 3)):
        server.break_after[number] = rng.randrange(len(CONTENT))
    if rng.random() < 0.3:
        server.change_to[rng.randint(1, 3)] = OTHER
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        path = assets.resolve(server.location(f"files/{seed}"))
        return "complete" if path.read_bytes() in (CONTENT, OTHER) else "wrong"
    except OSError:
        return "error"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PARTS = [Part("hostile files", hostile, 25.0), Part("downloads", downloads, 15.0)]

"""Damaged files of every kind that Piston reads.

Each kind is read in a process of its own, with bounded memory, so that a crash of a library ends
that kind only. After each change a file is read again: the same values, other values, or an error.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.data.recording_cases import FEATURES, FPS, as_v21, record
from tests.data.synthetic import picture, png
from tests.training.running import tiny
from tests.training.test_step import make_trainer
from tests.weights.test_orbax import arrays_of, write_arrays

from piston.data import open_dataset
from piston.data.columns import decode_image
from piston.data.record import Recorder
from piston.inference import load_policy
from piston.progress import Progress
from piston.training.checkpoint import restore
from piston.training.loop import train_loop
from piston.training.run import list_runs
from piston.weights import open_checkpoint
from rows import Part, Row

REFERENCE = Path(__file__).parents[1] / "reference"
_MEMORY = 12 * 2**30  # of address space; torch alone maps several gigabytes
_VALUES = [None, True, -1, 0, 3, 1e300, 2**70, "", "x", "../../x", "{episode_index[0]}", [], {}]
_VALUES += [[[]], [None], {"a": 1}, [1, "x"], "nan"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files of one kind: how a good folder is made, which files are changed, how it is read."""

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    # Whether a change of the values must be noticed, because the format has checksums.
    checked: bool = False


def _recorded(folder: Path) -> None:
    with Recorder(folder, FPS, FEATURES, "arm", "h264") as recorder:
        for episode in range(3):
            record(recorder, episode)


def _recorded_v21(folder: Path) -> None:
    _recorded(folder.with_name("source"))
    as_v21(folder.with_name("source"), folder)


def _digest(item: dict[str, Any]) -> str:
    parts = [f"{key}{item[key]!r}" for key in sorted(item) if isinstance(item[key], str)]
    arrays = [(key, np.asarray(item[key])) for key in sorted(item) if key not in ("task",)]
    text = "".join([*parts, *(f"{key}{value.dtype}{value.shape}" for key, value in arrays)])
    data = b"".join(np.ascontiguousarray(v).tobytes() for _, v in arrays if v.dtype.kind in "biuf")
    return hashlib.sha256(text.encode() + data).hexdigest()


def read_set(folder: Path) -> dict[tuple[int, int], str]:
    """Return a digest of each frame. Left-out episodes are reported, so they are no difference."""
    dataset = open_dataset(folder)
    try:
        items = (dataset[index] for index in range(len(dataset)))
        return {(int(i["episode_index"]), int(i["frame_index"])): _digest(i) for i in items}
    finally:
        dataset.close()


def _png(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    noisy = picture(3) // 2 + rng.integers(0, 100, (64, 64, 3), np.uint8)
    (folder / "frame.png").write_bytes(png(noisy)["bytes"])


def _read_png(folder: Path) -> bytes:
    cell = {"bytes": None, "path": "frame.png"}
    try:
        return decode_image(cell, folder).tobytes()
    except ValueError as error:  # the data set adds the file and the row
        raise ValueError(f"{folder / 'frame.png'}: {error}") from error


def _policy(folder: Path) -> None:
    shutil.copytree(REFERENCE / "checkpoints_0.1.0" / "pi0_aloha", folder)


def _read_policy(folder: Path) -> Any:
    state = load_policy(folder).model.state_dict()
    return {name: hash(value.numpy().tobytes()) for name, value in state.items()}


def _orbax(folder: Path) -> None:
    shutil.copytree(REFERENCE / "models" / "pi0" / "params", folder)


def _zarr(folder: Path) -> None:
    write_arrays(folder, arrays_of(REFERENCE / "models" / "pi0" / "params"), ocdbt=False)


def _read_tensors(folder: Path) -> dict[str, int]:
    checkpoint = open_checkpoint(folder)
    return {name: hash(checkpoint.tensor(name).numpy().tobytes()) for name in checkpoint.names()}


def _run(folder: Path) -> None:
    made = train_loop(tiny(folder.with_name("made"), save_interval=3)).parent
    shutil.copytree(made, folder / "tiny" / "run")


def _resume(folder: Path) -> dict[str, int]:
    """Go on from the newest checkpoint that is whole; the end is the same wherever that is."""
    step = train_loop(tiny(folder, resume=True))
    checkpoint = open_checkpoint(step)
    return {name: hash(checkpoint.tensor(name).numpy().tobytes()) for name in checkpoint.names()}


def _restore(folder: Path) -> None:
    restore(make_trainer(), folder / "tiny" / "run" / "5")


KINDS = [
    Kind("info.json", _recorded, ("meta/info.json",), read_set),
    Kind("info.json, v2.1", _recorded_v21, ("meta/info.json",), read_set),
    Kind("episodes and tasks, v2.1", _recorded_v21, ("meta/*.jsonl",), read_set),
    Kind("episodes and tasks, v3.0", _recorded, ("meta/**/*.parquet",), read_set),
    Kind("parquet of Piston", _recorded, ("data/**/*.parquet",), read_set, checked=True),
    Kind("mp4 (H.264)", _recorded, ("videos/**/*.mp4",), read_set),
    Kind("png", _png, ("frame.png",), _read_png, checked=True),
    Kind("config.json", _policy, ("config.json",), _read_policy),
    Kind("norm_stats.json", _policy, ("assets/**/*.json",), _read_policy),
    Kind("model.safetensors", _policy, ("model.safetensors",), _read_policy),
    Kind("Orbax, index", _orbax, ("manifest.ocdbt", "d/*"), _read_tensors, checked=True),
    Kind("Orbax, all files", _orbax, ("**/*",), _read_tensors),
    Kind("zarr, plain files", _zarr, ("**/.z*", "*/*"), _read_tensors),
    Kind("training checkpoint", _run, ("tiny/run/5/**/*",), _resume, checked=True),
    Kind("its .metadata (pickle)", _run, ("tiny/run/5/train_state/.metadata",), _restore),
    Kind("run.json", _run, ("tiny/run/run.json",), list_runs),
]


def changed(path: Path, data: bytes, rng: random.Random) -> bytes:
    """Return other content: bits, bytes, a part lost or moved; of JSON also other values."""
    if path.suffix in (".json", ".jsonl") and rng.random() < 0.7:
        lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
        number = rng.randrange(len(lines))
        lines[number] = json.dumps(_other_value(json.loads(lines[number]), rng))
        return "\n".join(lines).encode()
    start = rng.randrange(len(data)) if data else 0
    end = min(len(data), start + rng.choice([1, 4, 64, 1024]))
    part, other = data[start:end], rng.randbytes(end - start)
    flipped = bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:] if part else b"x"
    middles = [flipped, flipped, other, bytes(len(part)), b"", part + part, other + part]
    if rng.random() < 0.15:
        return data[:start]
    return data[:start] + rng.choice(middles) + data[end:]


def _other_value(value: Any, rng: random.Random) -> Any:
    """Return JSON with one value somewhere replaced or removed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        result = copy.copy(value)
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if rng.random() < 0.1:
            del result[key]
        else:
            result[key] = _other_value(value[key], rng)
        return result
    return rng.choice(_VALUES)


@dataclasses.dataclass
class Outcome:
    """How often what came of a change; `seen` has an example of each kind of fault."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    seen: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.seen.setdefault(what, example)


def try_kind(name: str, seconds: float, seed: int) -> Outcome:
    """Change files of one kind for so long. Runs in a process of its own."""
    [kind] = [kind for kind in KINDS if kind.name == name]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rng, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory() as temporary:
        good, folder = Path(temporary) / "good", Path(temporary) / "tried"
        kind.make(good)
        shutil.copytree(good, folder)
        expected, end = kind.read(folder), time.monotonic() + seconds
        paths = sorted({path for pattern in kind.files for path in good.glob(pattern)})
        paths = [path.relative_to(good) for path in paths if path.is_file()]
        while time.monotonic() < end:
            path = rng.choice(paths)
            data = changed(path, (good / path).read_bytes(), rng)
            if data == (good / path).read_bytes():
                continue
            shutil.rmtree(folder)
            shutil.copytree(good, folder, copy_function=shutil.copyfile)
            (folder / path).write_bytes(data)
            outcome.add(*_result(kind, folder, path, expected))
    return outcome


def _result(kind: Kind, folder: Path, path: Path, expected: Any) -> tuple[str, str]:
    try:
        found = kind.read(folder)
    except (ValueError, OSError) as error:
        names = (str(folder), path.name, str(path.parent))
        clear = any(name in str(error) for name in names)
        return ("error" if clear else "unclear"), f"{path}: {type(error).__name__}: {error}"
    except BaseException as error:
        return "traceback", f"{path}: {type(error).__name__}: {error}"
    if kind.read is read_set:
        same = all(expected.get(place) == value for place, value in found.items())
    else:
        same = found == expected
    return ("same" if same else "different"), str(path)


def outcomes(seconds: float, seed: int) -> Iterator[tuple[Kind, Outcome]]:
    """Yield what came of each kind, read in processes of their own."""
    context = multiprocessing.get_context("fork")  # this process has imported what they need
    for number, kind in enumerate(KINDS):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            job = pool.submit(try_kind, kind.name, seconds / len(KINDS), seed + number)
            try:
                yield kind, job.result()
            except BrokenProcessPool:
                outcome = Outcome()
                outcome.add("crash", "the process died")
                yield kind, outcome


def damage(seconds: float, seed: int, progress: Progress) -> list[Row]:
    """Change files of each kind; no traceback, and no difference where there are checksums."""
    rows, began = [], time.monotonic()
    for kind, outcome in outcomes(seconds, seed):
        counts = outcome.counts
        faults = {name: counts[name] for name in ("traceback", "unclear", "crash")}
        if kind.checked:
            faults["different"] = counts["different"]
        bad = {name: count for name, count in faults.items() if count}
        for name in bad:
            logging.getLogger(__name__).error("%s: %s: %s", kind.name, name, outcome.seen[name])
        told = [f"{counts['error']:,} errors", f"{counts['same']:,} harmless"]
        if not kind.checked:
            told.append(f"{counts['different']:,} other values")
        found = ", ".join([*told, *(f"{count} {name}" for name, count in bad.items())])
        required = "clear errors" + (", no other values" if kind.checked else "")
        rows.append(Row(f"damaged {kind.name}", sum(counts.values()), found, required, not bad))
        progress(round(time.monotonic() - began), None, kind.name)
    return rows


PARTS = [Part("damaged files", damage, 100.0)]

"""Small recorded data sets of a real robot's kind (LIBERO's keys), with their statistics."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from piston.config import AssetsConfig
from piston.data.record import Recorder
from piston.robots.simple import LeRobotLiberoDataConfig
from piston.transforms.normalize import NormStats, write_norm_stats

from .tiny_presets import PI0

LIBERO = dataclasses.replace(PI0, max_token_len=24)
PIXELS = 40
_CAMERA = {"dtype": "image", "shape": (PIXELS, PIXELS, 3), "names": ["height", "width", "channel"]}
FEATURES = {
    "image": _CAMERA,
    "wrist_image": _CAMERA,
    "state": {"dtype": "float32", "shape": (8,), "names": None},
    "actions": {"dtype": "float32", "shape": (7,), "names": None},
}


def record(
    folder: Path,
    *,
    episodes: int,
    frames: int,
    state_dim: int = 8,
    names: Any = None,
    cameras: str = "image",
    **how: Any,
) -> None:
    """`how` is for the recorder, such as `fps`; `names` are those of the state."""
    random = np.random.default_rng(0)
    state = {"dtype": "float32", "shape": (state_dim,), "names": names}
    how = {"fps": 10, **how}
    camera = {**_CAMERA, "dtype": cameras}
    features = {**FEATURES, "image": camera, "wrist_image": camera, "state": state}
    with Recorder(folder, features=features, **how) as recorder:
        for episode in range(episodes):
            for _ in range(frames):
                pictures = random.integers(256, size=(2, PIXELS, PIXELS, 3), dtype=np.uint8)
                frame = {
                    "image": pictures[0],
                    "wrist_image": pictures[1],
                    "state": random.normal(size=state_dim).astype(np.float32),
                    "actions": random.normal(size=7).astype(np.float32),
                }
                recorder.add_frame(frame, task=f"put the cup on plate {episode}")
            recorder.save_episode()


def recorded(folder: Path, *, episodes: int, frames: int, **how: Any) -> dict[str, Any]:
    """Changes to a `TrainConfig` that make it train on a new set, whose statistics are there."""
    record(folder / "cups", episodes=episodes, frames=frames, **how)
    factory = LeRobotLiberoDataConfig(
        repo_id=str(folder / "cups"),
        assets=AssetsConfig(assets_dir=str(folder / "assets"), asset_id="libero"),
        prompt_from_task=True,
    )
    stats = {
        key: NormStats(np.zeros(dim), np.ones(dim), np.full(dim, -2.0), np.full(dim, 2.0))
        for key, dim in (("state", 8), ("actions", 7))
    }
    write_norm_stats(folder / "assets" / "libero", stats)
    return {"data": factory, "model": LIBERO}


def spoil(folder: Path, column: str, row: int, value: Any) -> None:
    """Put a value into a row of a recorded set."""
    for path in sorted(folder.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        if row < len(table):
            break
        row -= len(table)
    values = table[column].to_pylist()
    values[row] = value
    changed = pa.chunked_array([pa.array(values, table[column].type)])
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, table.schema.field(place), changed), path)

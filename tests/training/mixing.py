"""The data of `tiny_mixture`: cups (no subtasks), drawers at another rate, and pictures.

<folder>/cups       3 episodes of 8 frames at 10 Hz, LIBERO's keys, 7 action dimensions
<folder>/drawers    3 episodes of 8 frames at 20 Hz, MetaWorld's keys, 4 action dimensions
<folder>/pictures   4 questions in a table
<folder>/assets     the statistics, once `piston stats` has run
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from piston.cli.train import parse
from piston.config import TrainConfig
from piston.data.language import Question
from piston.data.record import Recorder

from .recording import PIXELS, record

FRAMES = 8
CORNER = "observation.images.corner4"
# By frame of an episode; the last episode has no labels.
SUBTASKS = ["", "", *["reach"] * 3, *["pull"] * 3]
QUESTIONS = [("What is it?", "a cup"), ("Is it open?", "yes"), ("Where?", "left"), ("So?", "no")]
_VECTOR = {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "gripper"]}
_FEATURES = {
    CORNER: {"dtype": "image", "shape": (PIXELS, PIXELS, 3)},
    "observation.state": _VECTOR,
    "action": _VECTOR,
}


def record_all(folder: Path) -> None:
    record(folder / "cups", episodes=3, frames=FRAMES)
    record_drawers(folder / "drawers")
    write_pictures(folder / "pictures")


def record_drawers(root: Path) -> None:
    """In every labelled episode, frame 3 has a question."""
    random = np.random.default_rng(1)
    with Recorder(root, 20, _FEATURES, language=True) as recorder:
        for episode in range(3):
            for step in range(FRAMES):
                frame = {
                    CORNER: random.integers(256, size=(PIXELS, PIXELS, 3), dtype=np.uint8),
                    **{
                        key: random.normal(size=4).astype(np.float32)
                        for key in ("observation.state", "action")
                    },
                }
                labelled = episode < 2
                asked = [Question(CORNER, f"Step {step}?", "yes")] if labelled and step == 3 else []
                subtask = SUBTASKS[step] if labelled else ""
                recorder.add_frame(
                    frame, "open the drawer", subtask=subtask or None, questions=asked
                )
            recorder.save_episode()


def write_pictures(root: Path, questions: list[tuple[str, str]] = QUESTIONS) -> None:
    root.mkdir(parents=True)
    rows = []
    for number, (question, answer) in enumerate(questions):
        picture = np.full((20, 30, 3), (60 * number, 90, 200), np.uint8)
        Image.fromarray(picture).save(root / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": question, "answer": answer})
    (root / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))


def options(folder: Path) -> list[str]:
    """The options of `piston train tiny_mixture` and `piston stats tiny_mixture` for these data."""
    sets = [f"--data.{name}.repo-id={folder / name}" for name in ("cups", "drawers", "pictures")]
    return [*sets, f"--assets-base-dir={folder / 'assets'}"]


def mixture(data: Path, runs: Path, *words: str, **changes: Any) -> TrainConfig:
    """The configuration of a run, with further options and changes."""
    config = parse(["tiny_mixture", *options(data), f"--checkpoint-base-dir={runs}", *words])
    return dataclasses.replace(config, **changes)

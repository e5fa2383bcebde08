"""The section on data sets: lengths and tasks are counted over all sets of a run."""

import dataclasses
import re

import numpy as np
import pytest

from piston.data.dataset import open_dataset
from piston.data.record import Recorder
from piston.report.dataset import dataset
from piston.report.training import read_run

FEATURES = {"action": {"dtype": "float32", "shape": (2,), "names": None}}


def _record(folder, lengths, fps=10):
    with Recorder(folder, fps, FEATURES, "arm") as recorder:
        for number, length in enumerate(lengths):
            for _ in range(length):
                recorder.add_frame({"action": np.zeros(2, np.float32)}, f"task {number}")
            recorder.save_episode()
    return open_dataset(folder)


@pytest.fixture(scope="module")
def section(run, tmp_path_factory):
    """Two sets: 8 episodes of 1 s, each with another task, and 8 of 2 s at another rate."""
    folder = tmp_path_factory.mktemp("sets")
    sets = [_record(folder / "a", [10] * 8), _record(folder / "b", [10] * 8, fps=5)]
    found = read_run(run)
    names = {"repo_id": str(folder / "a"), "extra_datasets": (str(folder / "b"),)}
    data = dataclasses.replace(found.config.data, **names)
    config = dataclasses.replace(found.config, data=data)
    return dataset(dataclasses.replace(found, config=config), sets)


def test_the_histogram_counts_every_episode(section):
    assert "from 1.0 s to 2.0 s" in section
    outline = re.search('<path d="([^"]*)" class="line bars"', section)[1]
    points = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", outline)]
    (left, bottom), (right, end) = points[0], points[-1]
    assert bottom == end  # on the axis
    assert right > left
    # Two bars of equal height: all episodes are in the first and the last of five.
    top = min(y for _, y in points)
    assert [x for x, y in points if y == top] == pytest.approx(
        [left + share * (right - left) for share in (0, 0.2, 0.8, 1)], abs=0.2
    )


def test_tasks_of_all_sets_are_counted(section):
    assert "8 tasks" in section
    assert section.count("<td>2</td>") == 8  # episodes of each task
    assert section.count("<td>arm</td>") == 2


def test_without_cameras_there_are_no_first_frames(section):
    assert "First frames" not in section

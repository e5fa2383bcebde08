from pathlib import Path

import pytest

from piston.report.page import write_report
from piston.stages import Stages
from piston.training.loop import train_loop

from . import cases


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder with everything: data, a run, an evaluation, stages."""
    folder = tmp_path_factory.mktemp("report")
    cases.record(folder / "data")
    config = cases.config(folder)
    cases.write_statistics(config)
    train_loop(config)
    cases.write_evaluation(folder / "eval")
    stages = Stages({"demo": "none"}, peak_memory_bytes=1_500_000_000)
    for name, seconds in (("record", 3.0), ("train", 200.0)):
        stages.add(name, seconds, f"{name} went well")
    stages.write(folder / "stages.json")
    return folder


@pytest.fixture(scope="session")
def run(root) -> Path:
    return cases.config(root).checkpoint_dir


@pytest.fixture(scope="session")
def page(root, run) -> Path:
    """The page with every part."""
    out = root / "whole" / "report.html"
    return write_report(run, out, evaluations=[root / "eval"], stages=root / "stages.json")

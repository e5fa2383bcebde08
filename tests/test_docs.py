"""The pages' code runs as it stands, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    REPOSITORY / "README.md",
    *sorted(page for page in DOCS.glob("*.md") if BLOCK.search(page.read_text("utf-8"))),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_page_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(BLOCK.findall(page.read_text("utf-8"))), "utf-8")
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_new_robot_takes_less_than_sixty_lines():
    robot, preset, *_ = BLOCK.findall((DOCS / "your-robot.md").read_text("utf-8"))
    assert len((robot + preset).splitlines()) < 60

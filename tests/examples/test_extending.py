"""The page on extending Piston shows the programs in examples/extending as they are."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = sorted((REPOSITORY / "examples" / "extending").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_page_shows_the_whole_program(program):
    page = (REPOSITORY / "docs" / "extending.md").read_text("utf-8")
    assert f"```python\n{program.read_text('utf-8')}```\n" in page

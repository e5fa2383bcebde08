"""The pages are true: their code runs and prints what they show, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
# A block of Python, and what it prints if the page shows that directly below it.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^]]*\]\(([^)\s]+)\)")
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.glob("*.md"))]
PROGRAMS = [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))]
MARK = "\x1e"  # between the outputs of two blocks


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_code_of_page_runs_and_prints_what_it_shows(page, tmp_path):
    blocks, shown = zip(*BLOCK.findall(page.read_text("utf-8")))
    script = tmp_path / "page.py"
    script.write_text(f"\nprint({MARK!r}, end='')\n".join(blocks), "utf-8")
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for code, expected, found in zip(blocks, shown, result.stdout.split(MARK), strict=True):
        if expected:
            assert found == expected, code


def anchors(page):
    """The names by which the headings of a page can be linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text("utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_new_robot_takes_less_than_sixty_lines():
    (robot, _), (preset, _), *_ = BLOCK.findall((DOCS / "your-robot.md").read_text("utf-8"))
    assert len((robot + preset).splitlines()) < 60

"""Imports go one way. This test reads every import in the source and holds the line."""

import ast
import re
from pathlib import Path

import pytest

import piston
import piston_client

SOURCE = Path(piston.__file__).parent
CLIENT = Path(piston_client.__file__).parent

# A file may use what stands in an earlier row, or in its own package; never what comes later.
ROWS = (
    (
        "moved",
        "older_configs",
        "logs",
        "progress",
        "files",
        "suggestions",
        "signals",
        "extras",
        "rules",
        "llvm",
    ),
    ("observation", "assets", "serialization", "stages"),
    ("tokenizers",),
    ("transforms", "models"),
    ("config",),
    ("robots", "weights"),
    ("data",),
    ("presets",),
    ("training", "inference"),
    ("serving", "sim"),
    ("inspection", "verification"),
    ("report",),
    ("viewer",),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(ROWS) for name in row}


def _parts_imported(path: Path) -> set[str]:
    """The top-level parts of Piston that a file imports, function-level imports included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= (
                {f"{module}.{alias.name}" for alias in node.names}
                if module == "piston"
                else {module}
            )
    return {name.split(".")[1] for name in names if name.startswith("piston.")}


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", _files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_point_backwards(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    imported = _parts_imported(path) - {own}
    assert own in LEVEL, f"{own} has no row in this test: decide where it stands"
    later = {name for name in imported if LEVEL[name] >= LEVEL[own]}
    assert not later, f"{path.relative_to(SOURCE)} may not import {sorted(later)}"


def test_the_tree_in_the_readme_has_every_part_in_this_order():
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    tree = text.partition("\nsrc/piston/\n")[2].partition("\n```")[0]
    shown = re.findall(r"^  (\w+)(?:/|\.py) ", tree, re.MULTILINE)
    assert sorted(shown) == sorted(LEVEL)
    assert shown == sorted(shown, key=LEVEL.__getitem__)


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=lambda path: path.name)
def test_the_client_imports_nothing_of_piston(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        assert "piston" not in {name.partition(".")[0] for name in names}, names

"""`make check` compares the size of every package with the table in CONTRIBUTING.md."""

import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
main = runpy.run_path(str(REPOSITORY / "scripts" / "sizes.py"))["main"]


@pytest.fixture
def repository(tmp_path):
    """A package of 1 line at the top, and one of 10 in `data`; the table allows 1 and 10."""
    (tmp_path / "src/piston/data/deep").mkdir(parents=True)
    (tmp_path / "src/piston/logs.py").write_text("a = 1\n")
    (tmp_path / "src/piston/data/a.py").write_text("a = 1\n" * 4)
    (tmp_path / "src/piston/data/deep/b.py").write_text("a = 1\n" * 6)
    (tmp_path / "CONTRIBUTING.md").write_text("| `piston` | 1 |\n| `piston.data` | 10 |\n")
    return tmp_path


def test_lines_are_shown_beside_the_table(repository, capsys):
    main(repository)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["package", "lines", "table"],
        ["piston", "1", "1"],
        ["piston.data", "10", "10"],
        ["all", "11", "11"],
    ]


def test_ten_percent_more_are_allowed_and_no_line_above(repository):
    path = repository / "src/piston/data/a.py"
    path.write_text("a = 1\n" * 5)
    main(repository)
    path.write_text("a = 1\n" * 6)
    with pytest.raises(SystemExit, match=r"10 % larger .*: piston\.data\. Make them smaller"):
        main(repository)


@pytest.mark.parametrize("change", ["new package", "old row"])
def test_packages_and_rows_belong_together(repository, change):
    name = "sim"
    if change == "new package":
        (repository / "src/piston/sim").mkdir()
        (repository / "src/piston/sim/a.py").write_text("a = 1\n")
    else:
        with (repository / "CONTRIBUTING.md").open("a") as table:
            table.write("| `piston.sim` | 1 |\n")
    with pytest.raises(SystemExit, match=rf"same packages: piston\.{name}\. Add or remove"):
        main(repository)

"""Compare the lines of Python in every package with the table in CONTRIBUTING.md.

    python scripts/sizes.py

Part of `make check`. A package that is more than 10 % larger than its row fails: either make it
smaller, or change its row in the same commit and say why in the commit's message.
"""

import re
import sys
from collections import Counter
from pathlib import Path

SOURCES = {"src/piston": "piston", "packages/piston-client/src/piston_client": "piston_client"}
ROW = re.compile(r"^\| `([\w.]+)` \| ([\d,]+) \|$", re.MULTILINE)
TOLERANCE = 1.1


def count_lines(repository: Path) -> Counter:
    """Return the lines of each package; files at the top of `piston` count as `piston` itself."""
    lines: Counter = Counter()
    for folder, package in SOURCES.items():
        for path in (repository / folder).rglob("*.py"):
            parents = path.relative_to(repository / folder).parts[:-1]
            lines[".".join((package, *parents[:1]))] += len(path.read_text("utf-8").splitlines())
    return lines


def read_limits(repository: Path) -> dict:
    """Return the lines that the table in CONTRIBUTING.md gives each package."""
    table = (repository / "CONTRIBUTING.md").read_text("utf-8")
    return {package: int(lines.replace(",", "")) for package, lines in ROW.findall(table)}


def main(repository: Path = Path(__file__).parent.parent) -> None:
    lines = count_lines(repository)
    limits = read_limits(repository)
    print(f"{'package':<20} {'lines':>7} {'table':>7}")
    for package in sorted({*lines, *limits}):
        print(f"{package:<20} {lines[package]:>7,} {limits.get(package, 0):>7,}")
    print(f"{'all':<20} {lines.total():>7,} {sum(limits.values()):>7,}")
    unlisted = sorted(set(lines) ^ set(limits))
    if unlisted:
        sys.exit(
            f"error: The table of sizes in CONTRIBUTING.md and the source do not have the same "
            f"packages: {', '.join(unlisted)}. Add or remove their rows."
        )
    over = [package for package in lines if lines[package] > TOLERANCE * limits[package]]
    if over:
        sys.exit(
            f"error: More than 10 % larger than the table of sizes in CONTRIBUTING.md allows: "
            f"{', '.join(over)}. Make them smaller, or change their rows in the same commit and "
            "say why."
        )


if __name__ == "__main__":
    main()

"""Rules: from which number on something is a finding, how bad that is, and what is said then.

The verdicts of the inspector are tables of rules, one row for each kind. A new one is a row and the
function that returns its number; JSON, pages and the table in the documentation follow from the
row.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

# A problem is to be fixed; a remark is for information, and may be intended.
Severity = Literal["problem", "remark"]


@dataclasses.dataclass(frozen=True)
class Rule(Generic[T]):
    """A kind of finding: `number` of what was measured, compared with `limit`."""

    # For scripts: stays the same between versions, such as "camera-ignored".
    kind: str
    severity: Severity
    # A function of what was measured where the limit depends on it.
    limit: float | Callable[[T], float]
    # With {number}, {limit} and {of…}, which is what was measured, such as {of.name}.
    message: str
    # None where the rule does not apply or nothing is known.
    number: Callable[[T], float | None]
    # Formatted in the same way: which camera, dimension, word … it is about.
    subject: str = ""
    # For the documentation: which number is compared with which limit.
    meaning: str = ""
    # Whether the number and the limit make a finding: greater than the limit, unless given.
    compare: Callable[[float, float], Any] = operator.gt

    def exceeded_by(self, measured: T) -> tuple[float, float] | None:
        """Return the number and the limit if they make a finding."""
        number = self.number(measured)
        if number is None or math.isnan(number):
            return None
        limit = self.limit(measured) if callable(self.limit) else self.limit
        return (number, limit) if self.compare(number, limit) else None

    def texts(self, measured: T, number: float, limit: float) -> tuple[str, str]:
        """Return the subject and the message."""
        values = {"of": measured, "number": number, "limit": limit}
        return self.subject.format(**values), self.message.format(**values)


def markdown_table(rules: Iterable[Rule[Any]]) -> str:
    """Return the rules as the documentation shows them; those of equal meaning share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        kinds = rows.setdefault((rule.severity, rule.meaning), [])
        if (kind := f"`{rule.kind}`") not in kinds:
            kinds.append(kind)
    lines = ["| kind | severity | raised if |", "|---|---|---|"]
    for (severity, meaning), kinds in rows.items():
        lines.append(f"| {', '.join(kinds)} | {severity} | {meaning} |")
    return "\n".join(lines)

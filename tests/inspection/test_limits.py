"""The table of conclusions in the documentation is that of the rules."""

import re
from pathlib import Path

import pytest

from piston.inspection.live_verdicts import LIVE_RULES
from piston.inspection.verdicts import INFLUENCE_RULES, OPEN_LOOP_RULES
from piston.rules import Rule, markdown_table

DOCS = Path(__file__).parents[2] / "docs"
RULES = (*INFLUENCE_RULES, *OPEN_LOOP_RULES, *LIVE_RULES)


def test_the_table_in_the_documentation_is_that_of_the_rules():
    text = (DOCS / "inspect.md").read_text()
    assert markdown_table(RULES) in text, f"Replace the table by:\n\n{markdown_table(RULES)}"


def test_every_kind_in_the_guide_is_one_of_a_rule():
    named = re.findall("`([a-z]+(?:-[a-z]+)+)`", (DOCS / "why-it-fails.md").read_text())
    assert len(named) > 20
    assert set(named) <= {rule.kind for rule in RULES}


@pytest.mark.parametrize(("number", "is_found"), [(0.6, True), (0.5, False), (None, False)])
def test_a_new_verdict_is_a_row_and_a_function(number, is_found):
    rule = Rule(
        kind="too-fast",
        severity="remark",
        limit=0.5,
        message="{of[name]} moves at {number:.1f} m/s, more than {limit:g}.",
        number=lambda measured: measured["speed"],
        subject="{of[name]}",
    )
    measured = {"name": "waist", "speed": number}
    found = rule.exceeded_by(measured)
    assert (found is not None) == is_found
    if found:
        assert rule.texts(measured, *found) == ("waist", "waist moves at 0.6 m/s, more than 0.5.")

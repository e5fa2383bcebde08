"""How every episode ended, and videos of some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from piston.report import pictures
from piston.report.contents import Contents, Missing
from piston.report.markup import Markup, join, tag
from piston.sim.scores import Evaluation, Outcome, Rate

_LOOKS = {
    "held": "fulfilled, and still at the end",
    "lost": "fulfilled, then lost",
    "failed": "failed",
}


def success(contents: Contents) -> Markup | Missing:
    if not contents.evaluations:
        return Missing(f"the policy was not evaluated. {contents.how_to_evaluate}")
    legend = (tag("span", tag("i", class_=f"cell {look}"), text) for look, text in _LOOKS.items())
    several = len(contents.evaluations) > 1
    parts = (_evaluation(evaluation, several) for evaluation in contents.evaluations)
    return join([tag("div", *legend, class_="legend"), *parts])


def _evaluation(evaluation: Evaluation, several: bool) -> Markup:
    facts = (
        f"{evaluation.task}: {evaluation.success} fulfilled at some time, {evaluation.held} still "
        f"at the end. Policy {evaluation.policy}, {evaluation.execute_horizon} steps of each chunk "
        "executed. Intervals are Wilson's, 95 %."
    )
    if evaluation.opposite:
        facts = (
            "Here the sentence asked for the opposite of what is counted: a cell marked as failed "
            "is an episode in which the robot did not do what it was not asked for. The same "
            f"starts with the sentence that is counted are in the other evaluation. {facts}"
        )
    groups = evaluation.by_prompt
    grids = (_grid(prompt, outcomes, len(groups) > 1) for prompt, outcomes in groups.items())
    title = tag("h3", evaluation.name) if several else None
    return join([title, tag("p", facts, class_="note"), *grids])


def _grid(prompt: str, outcomes: Sequence[Outcome], titled: bool) -> Markup:
    rate = Rate.of(outcomes)
    title = tag("h4", f"“{prompt}” ", tag("span", rate, class_="quiet-text")) if titled else None
    cells = (
        tag("span", outcome.seed, class_=f"cell {_look(outcome)}", title=_told(outcome))
        for outcome in outcomes
    )
    return join([title, tag("div", *cells, class_="seeds")])


def _look(outcome: Outcome) -> str:
    if not outcome.success:
        return "failed"
    return "held" if outcome.held else "lost"


def _told(outcome: Outcome) -> str:
    ending = _LOOKS[_look(outcome)]
    return f"seed {outcome.seed}: {ending}; {outcome.steps} steps; “{outcome.prompt}”"


def videos(contents: Contents) -> Markup | Missing:
    filmed = [evaluation for evaluation in contents.evaluations if evaluation.videos]
    if not filmed:
        return Missing(f"there are no videos. {contents.how_to_evaluate}")
    return join(_films(evaluation, len(filmed) > 1) for evaluation in filmed)


def _films(evaluation: Evaluation, several: bool) -> Markup:
    title = tag("h3", evaluation.name) if several else None
    films = (_film(path, evaluation) for path in evaluation.videos)
    return join([title, tag("div", *films, class_="films")])


def _film(path: Path, evaluation: Evaluation) -> Markup:
    video = tag(
        "video",
        src=pictures.mp4(path),
        controls=True,
        muted=True,
        loop=True,
        autoplay=True,
        playsinline=True,
    )
    return tag("figure", video, tag("figcaption", _told(evaluation.outcome_of(path))))

"""The overview of `piston inspect` as a page: conclusions, then what each input changes.

Dims: q questions, h steps of a chunk, a action dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from piston.files import write_text
from piston.inspection.influence import Influence
from piston.inspection.overview import Moment, Overview
from piston.inspection.questions import ALL, Question
from piston.inspection.results import Verdict
from piston.report.document import page_text
from piston.report.markup import (
    Line,
    Markup,
    card,
    figure,
    join,
    legend,
    multiples,
    note,
    picture,
    short,
    small_plot,
    table,
    tag,
)

_PICTURE = 160
# Of the moments, the actions that move most are shown.
_NUM_DIMS = 6
# A cell has its full colour from this many spreads on (without noise: standard deviations).
_FULL_COLOUR = 5.0
_SMALL = 0.01
_CHANGES = {
    "off": "taken out of attention",
    "black": "black picture",
    "other": "picture of another moment",
    "left out": "left out",
    "moved": "moved by one standard deviation",
}
_SENTENCES = {
    "empty": "no sentence",
    "other": "another sentence of the data set",
    "opposite": "the opposite sentence",
}


def write_inspection(overview: Overview, out: Path) -> Path:
    """Write the overview as one self-contained page."""
    write_text(out, inspection_page(overview))
    return out


def inspection_page(overview: Overview) -> str:
    """Return the same page as text."""
    about = overview.about
    subtitle = f"{about.policy}: {about.family} on {about.robot}, data set {about.data}"
    return page_text("Why it does that", subtitle, list(_cards(overview)), sections(overview))


def sections(overview: Overview) -> dict[str, Markup]:
    """Return all sections by title."""
    return {
        "Conclusions": verdicts(overview.verdicts),
        "What each input changes": influence(overview),
        "Moments": moments(overview),
    }


def _cards(overview: Overview) -> Iterator[Markup]:
    about = overview.about
    problems = sum(one.severity == "problem" for one in overview.verdicts)
    remarks = len(overview.verdicts) - problems
    yield card("problems", str(problems), f"and {remarks} remark{'s' * (remarks != 1)}")
    frames = len(overview.moments)
    yield card("frames asked", str(frames), f"of {about.num_frames:,} in the data set")
    if about.num_steps is not None:
        steps = f"of noise; {about.num_steps} denoising steps"
        yield card("seeds", str(about.num_seeds), steps)
    seconds = f"{about.num_actions / about.fps:.1f} s at {about.fps:g} per second"
    yield card("steps of a chunk", str(about.num_actions), seconds)
    yield card("parameters", short(about.num_parameters), f"{about.family} on {about.device}")


def verdicts(found: Sequence[Verdict]) -> Markup:
    """Return the conclusions in sentences, problems first."""
    if not found:
        return note("Nothing was found that looks wrong. The numbers below say what was compared.")
    text = (
        "A problem is something to mend; a remark is worth knowing and may be intended. Each rests "
        "on one number, which was compared with a threshold."
    )
    items = [
        tag(
            "li",
            tag("b", one.severity, class_="severity"),
            tag("span", one.sentence),
            tag("span", f"{one.number:.3g}, threshold {one.threshold:.3g}", class_="quiet-text"),
            class_=one.severity,
        )
        for one in found
    ]
    return join([note(text), tag("ul", *items, class_="verdicts")])


def influence(overview: Overview) -> Markup:
    """Return what every change of an input does to every action."""
    found = overview.influence
    effects = found.change_in_spreads
    unit = "spreads: 1 is what another noise changes"
    strengths = found.strength_in_spreads
    if effects is None or strengths is None:
        effects, strengths = found.change, found.strength
        unit = "the robot's units, and in all in standard deviations of the recorded actions"
    cells = effects.mean(1)
    text = (
        f"Each row is one change of the observation, with everything else and the noise as it was. "
        f"A cell says how much the action changes, averaged over the {effects.shape[1]} steps of "
        f"the chunk and {len(found.places)} frames, in {unit}. “All” has the actions in one "
        "number. An input whose rows are pale has no influence."
    )
    parts: list[Markup | None] = [note(text), _effects(found, cells, strengths)]
    parts.append(_words(found, overview.moments, strengths))
    parts.append(_over_steps(overview, effects))
    if found.carried_names:
        parts.append(_carried(overview))
    if found.skipped:
        reasons = (f"{_described(found, one)}: {reason}" for one, reason in found.skipped)
        listed = tag("ul", *(tag("li", reason) for reason in reasons))
        count = f"{len(found.skipped)} questions that were not asked"
        parts.append(tag("details", tag("summary", count), listed))
    return join(parts)


def _rows(found: Influence, input: str) -> dict[int, str]:
    """Return the questions about one kind of input, by number, with their names."""
    return {
        number: _described(found, question)
        for number, question in enumerate(found.questions)
        if question.input == input
    }


def _described(found: Influence, question: Question) -> str:
    input, subject, change = question
    if input == "sentence":
        return _SENTENCES.get(change, change)
    if input == "camera":
        name = "all cameras" if subject == ALL else found.cameras.get(subject, subject)
        return f"{name}: {_CHANGES.get(change, change)}"
    if input == "state":
        if subject == ALL:
            return "all: state of another moment"
        return subject.replace("_", " ")
    return f"“{subject}” {change}"


def _effects(
    found: Influence, cells: Float[np.ndarray, "q a"], strengths: Float[np.ndarray, " q"]
) -> Markup:
    """Return a table of questions × actions, coloured by the effect."""
    names = [tag("span", name.replace("_", " ")) for name in found.action_names]
    body: list[list[str | Markup]] = []
    for title, input in (("Cameras", "camera"), ("Sentence", "sentence"), ("State", "state")):
        rows = _rows(found, input)
        body += [[tag("b", title, class_="group")]] * bool(rows)
        body += [
            [name, _cell(strengths[number], name="b"), *(_cell(one) for one in cells[number])]
            for number, name in rows.items()
        ]
    if found.spread is not None:
        spread = (tag("span", _number(one)) for one in found.spread.mean(0))
        body.append([tag("b", "Noise", class_="group")])
        body.append(["one spread, in the robot's units", "", *spread])
    return table(["", "all", *names], body, class_="effects")


def _cell(value: float, *, name: str = "span") -> Markup:
    if not np.isfinite(value):
        return tag(name, "–")
    share = 100 * min(1.0, value / _FULL_COLOUR)
    return tag(name, _number(value), style=f"--share: {share:.0f}%")


def _number(value: float) -> str:
    """Return two digits, of which few are behind the point."""
    if 0 < value < _SMALL:
        return f"<{_SMALL:g}"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _words(
    found: Influence, shown: Sequence[Moment], strengths: Float[np.ndarray, " q"]
) -> Markup | None:
    """Return the sentences with every word coloured by what leaving it out changes."""
    known = {
        question.subject: strengths[number]
        for number, question in enumerate(found.questions)
        if question.input == "word"
    }
    if not known:
        return None
    lines = []
    for prompt in dict.fromkeys(moment.prompt for moment in shown):
        seen: dict[str, int] = {}
        words = []
        for word in prompt.split():
            seen[word] = seen.get(word, 0) + 1
            subject = word if seen[word] == 1 else f"{word} ({seen[word]})"
            value = known.get(subject, float("nan"))
            words.append(tag("div", word, _cell(value)))
        lines.append(tag("div", *words, class_="words"))
    return figure("Below each word: how much the actions change when it is left out.", *lines)


def _over_steps(overview: Overview, effects: Float[np.ndarray, "q h a"]) -> Markup:
    """Return the effects along the chunk, averaged over the actions."""
    found, about = overview.influence, overview.about
    seconds = np.arange(effects.shape[1]) / about.fps
    looks = [f"run-{number}" for number in range(7)]
    figures = []
    for input in ("camera", "sentence", "state"):
        rows = _rows(found, input)
        strongest = sorted(rows, key=lambda number: -np.nan_to_num(effects[number]).mean())[:4]
        lines = [
            Line(seconds, effects[number].mean(-1), look, rows[number])
            for number, look in zip(strongest, looks)
        ]
        if lines:
            entries = legend((line.look, line.name) for line in lines)
            figures.append(tag("div", small_plot(input, lines, from_zero=True), entries))
    text = (
        "The same along the chunk, averaged over the actions: the strongest changes of each kind "
        "of input. Where a curve rises late, the input decides what comes at the end of the chunk."
    )
    return figure(text, tag("div", *figures, class_="multiples"))


def _carried(overview: Overview) -> Markup:
    found = overview.influence
    seconds = np.arange(found.carried.shape[1]) / overview.about.fps
    text = (
        "How much of an error of the measured state remains in the target of the same joint: 1 "
        "means that the whole error is carried on, 0 that the policy corrects it. Policies that "
        "carry errors on drift, because nothing pulls them back."
    )
    figures = [
        small_plot(name, [Line(seconds, values), Line(seconds, np.zeros(len(seconds)), "fade")])
        for name, values in zip(found.carried_names, found.carried)
    ]
    shown = tag("div", *figures, class_="multiples")
    return tag("details", tag("summary", "Errors of the state"), figure(text, shown))


def moments(overview: Overview) -> Markup:
    """Return the frames that were asked about: pictures and chunks."""
    text = (
        "What the model saw in each frame, what it predicts there (the band is the standard "
        "deviation over noise seeds) and what was recorded, for the actions that move most."
    )
    return join([note(text), *(moment(overview, one) for one in overview.moments)])


def moment(overview: Overview, one: Moment) -> Markup:
    """Return one frame, folded until it is opened."""
    about = overview.about
    seconds = np.arange(len(one.predicted)) / about.fps
    pictures = (
        picture(pixels, about.cameras.get(slot, slot), _PICTURE)
        for slot, pixels in one.pictures.items()
    )
    ranges = np.ptp(one.predicted, axis=0)
    widest = float(ranges.max())
    figures = []
    for dim in sorted(np.argsort(-ranges, kind="stable")[:_NUM_DIMS].tolist()):
        mean, spread = one.predicted[:, dim], one.spread[:, dim]
        lines = [
            Line(seconds, mean - spread, "accent", opacity=0.35),
            Line(seconds, mean + spread, "accent", opacity=0.35),
            Line(seconds, mean, "accent"),
            Line(seconds, one.recorded[:, dim], "ink"),
        ]
        figures.append(small_plot(about.action_names[dim], lines, widest=widest))
    looks = [("ink", "recorded"), ("accent", "policy")]
    summary = f"Episode {one.episode}, frame {one.frame}: “{one.prompt}”"
    shown = multiples("", looks, figures, tag("div", *pictures, class_="thumbnails"))
    return tag("details", tag("summary", summary), shown, class_="moment")

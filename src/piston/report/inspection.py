"""The overview of `piston inspect` as a page: conclusions, then what each input changes.

Dims: q questions, h steps of a chunk, a action dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from piston.files import write_text
from piston.inference.policy import Policy
from piston.inspection.frames import Frames
from piston.inspection.influence import Influence
from piston.inspection.occlusion import overlay_map
from piston.inspection.overview import Moment, Overview, Plan, compute
from piston.inspection.questions import ALL, InputChange
from piston.inspection.results import Verdict
from piston.report.dataset import data_may_be_missing
from piston.report.document import page_text
from piston.report.inspection_inside import inside_section
from piston.report.inspection_live import live_section
from piston.report.inspection_open_loop import open_loop_section
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
from piston.sim.scores import Evaluation

_PICTURE, _MAP = 160, 320
# Of the moments, the actions that move most are shown.
_NUM_DIMS = 6
_NUM_STRONGEST = 6
# In the report of a run, which has to be quick.
_SHORT = Plan(frames=3, seeds=4, maps=1, map_budget=80, episodes=0, inside=False)
_MAX_FAILURES = 6
# A cell has its full colour from this many spreads on (without noise: standard deviations).
_FULL_COLOUR = 5.0
_SMALL = 0.01
_STEPS = "step of the chunk"
_CHANGES = {
    "off": "taken out of attention",
    "black": "black picture",
    "other": "picture of another moment",
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
    what = f"{about.family} on {about.robot}, data set {about.data}"
    subtitle = f"{about.policy}: {what}" if about.policy else what
    return page_text("Why it does that", subtitle, list(_cards(overview)), sections(overview))


def sections(overview: Overview) -> dict[str, Markup]:
    """Return all sections by title."""
    about = overview.about
    shown = {
        "Conclusions": verdicts(overview.verdicts),
        "What each input changes": influence(overview),
    }
    if any(one.maps for one in overview.moments):
        shown["Where it looks"] = where_it_looks(overview)
    if overview.live is not None:
        shown["Training against live"] = live_section(overview.live)
    if overview.open_loop:
        shown["Along an episode"] = open_loop_section(overview.open_loop, about.cameras)
    shown["Moments"] = moments(overview)
    if overview.inside is not None:
        names = about.action_names
        shown["Inside one inference"] = inside_section(overview.inside, names, about.cameras)
    return shown


def why(policy: Policy, evaluations: Sequence[Evaluation]) -> Markup:
    """Return the section of a run's page: a short overview, and the moments before failures."""
    with data_may_be_missing():
        frames = Frames.open(policy, policy.data.repo_id or "", policy.data.episodes)
        overview = compute(policy, frames, plan=_SHORT)
    # In a mixture, the first robot's.
    robot = note(f"Robot: {policy.data.entry}.") if policy.data.entry else None
    parts = [robot, verdicts(overview.verdicts), influence(overview), where_it_looks(overview)]
    for evaluation in evaluations:
        if evaluation.failures is not None:
            parts.append(tag("h3", f"Before failures, {evaluation.name}"))
            with data_may_be_missing():
                parts.append(_failures(policy, Frames.open(policy, evaluation.failures)))
    return join(parts)


def _failures(policy: Policy, frames: Frames) -> Markup:
    """Return the last request of each episode that failed, and the one in the middle."""
    places = [
        (episode, place)
        for episode, length in frames.episodes.items()
        for place in sorted({length // 2, length - 1})
    ]
    overview = compute(policy, frames, plan=_SHORT, places=places[:_MAX_FAILURES])
    text = (
        "What the policy saw before episodes failed. Dashed is the chunk that it answered then, "
        "solid the mean of what it answers with other noise."
    )
    shown = (moment(overview, number) for number in range(len(overview.moments)))
    return join([note(text), *shown])


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
    yield card(
        "steps of a chunk", str(about.num_actions), f"{len(about.action_names)} actions each"
    )
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
        f"the chunk and {len(found.places)} frames, in {unit}. “All” is one "
        "number for all actions, a root mean square, and may be larger than every cell. "
        "An input whose rows are pale has no influence."
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


def _described(found: Influence, question: InputChange) -> str:
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
    return f"without “{subject}”"


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
        spread = (tag("span", f"{one:.1g}") for one in found.spread.mean(0))
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
    return figure("Below each word: how much the actions change without it.", *lines)


def _over_steps(overview: Overview, effects: Float[np.ndarray, "q h a"]) -> Markup:
    """Return the effects along the chunk, averaged over the actions."""
    found = overview.influence
    steps = np.arange(effects.shape[1])
    looks = [f"run-{number}" for number in range(7)]
    figures = []
    for input in ("camera", "sentence", "state"):
        rows = _rows(found, input)
        strongest = sorted(rows, key=lambda number: -np.nan_to_num(effects[number]).mean())[:4]
        lines = [
            Line(steps, effects[number].mean(-1), look, rows[number])
            for number, look in zip(strongest, looks)
        ]
        if lines:
            entries = legend((line.look, line.name) for line in lines)
            figures.append(tag("div", small_plot(input, lines, _STEPS, from_zero=True), entries))
    text = (
        "The same along the chunk, averaged over the actions: the strongest changes of each kind "
        "of input. Where a curve rises late, the input decides what comes at the end of the chunk."
    )
    return figure(text, tag("div", *figures, class_="multiples"))


def _carried(overview: Overview) -> Markup:
    found = overview.influence
    steps = np.arange(found.carried.shape[1])
    text = (
        "How much of an error of the measured state remains in the target of the same joint: 1 "
        "means that the whole error is carried on, 0 that the policy corrects it. Policies that "
        "carry errors on drift, because nothing pulls them back."
    )
    figures = [
        small_plot(name, [Line(steps, values), Line(steps, np.zeros(len(steps)), "fade")], _STEPS)
        for name, values in zip(found.carried_names, found.carried)
    ]
    shown = tag("div", *figures, class_="multiples")
    return tag("details", tag("summary", "Errors of the state"), figure(text, shown))


def where_it_looks(overview: Overview) -> Markup:
    """Return the pictures with what covering each part changes laid over."""
    text = (
        "Parts of each picture were covered with the background: the median of pictures from the "
        "whole data set. The brighter a part, the more the actions change without it; the number "
        "is the largest change, in standard deviations of the recorded actions. A policy that does "
        "its task depends on the object, not on the table."
    )
    drawn = [picture for one in overview.moments for picture in _maps(overview, one)]
    return figure(text, tag("div", *drawn, class_="films"))


def _maps(overview: Overview, one: Moment) -> Iterator[Markup]:
    for found in one.maps:
        name = overview.about.cameras.get(found.camera, found.camera)
        text = f"{name}, episode {one.episode}, frame {one.frame}: {found.effect.max():.2g}"
        yield picture(overlay_map(one.pictures[found.camera], found), text, _MAP)


def moments(overview: Overview) -> Markup:
    """Return the frames that were asked about: pictures, chunks, and what matters there."""
    text = (
        "What the model saw in each frame, what it predicts there (pale: one standard deviation "
        "over noise seeds) and what was recorded, for the actions that move most; and which "
        "changes of the observation move the actions most in this frame."
    )
    shown = (moment(overview, number) for number in range(len(overview.moments)))
    return join([note(text), *shown])


def moment(overview: Overview, number: int, *, is_open: bool = False) -> Markup:
    """Return one frame, folded unless it is to be open."""
    about, one = overview.about, overview.moments[number]
    steps = np.arange(len(one.predicted))
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
            Line(steps, mean - spread, "accent", opacity=0.35),
            Line(steps, mean + spread, "accent", opacity=0.35),
            Line(steps, mean, "accent"),
            Line(steps, one.recorded[:, dim], "ink"),
        ]
        figures.append(small_plot(about.action_names[dim], lines, _STEPS, widest=widest))
    looks = [("ink", "recorded"), ("accent", "policy")]
    summary = f"Episode {one.episode}, frame {one.frame}: “{one.prompt}”"
    strongest = _strongest(overview.influence, number)
    seen = tag("div", *pictures, *_maps(overview, one), strongest, class_="thumbnails")
    shown = multiples("", looks, figures, seen)
    return tag("details", tag("summary", summary), shown, class_="moment", open=is_open or None)


def _strongest(found: Influence, number: int) -> Markup:
    """Return the changes that move the actions most in one frame, in spreads if there are."""
    values = found.strength_per_frame[number]
    if found.noise_per_frame is not None:
        values = values / max(found.noise_per_frame[number], 1e-9)
    order = np.argsort(-np.nan_to_num(values), kind="stable")[:_NUM_STRONGEST]
    rows = [(_described(found, found.questions[one]), _cell(values[one])) for one in order]
    unit = "spreads" if found.noise_per_frame is not None else "standard deviations"
    return table(("strongest here", unit), rows, class_="effects")

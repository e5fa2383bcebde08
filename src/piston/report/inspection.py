"""The overview of `piston inspect` as a page: conclusions, then what each input changes.

Dims: q questions, h steps of a chunk, a action dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup

from piston.inference.policy import Policy
from piston.inspection.frames import Frames
from piston.inspection.influence import Influence
from piston.inspection.occlusion import overlay_map
from piston.inspection.overview import Moment, Overview, Plan, compute
from piston.inspection.questions import ALL, InputChange, word_subjects
from piston.inspection.results import Verdict
from piston.report.dataset import data_may_be_missing
from piston.report.document import Card, page_text, render, small_plot
from piston.report.figures import Line, short
from piston.report.inspection_inside import inside_section
from piston.report.inspection_live import live_section
from piston.report.inspection_open_loop import open_loop_section
from piston.sim.scores import Evaluation

# Of the moments, the actions that move most are shown.
_NUM_DIMS = 6
_NUM_STRONGEST = 6
# In the report of a run, which has to be quick.
_SHORT = Plan(frames=3, seeds=4, maps=1, map_budget=80, episodes=0, inside=False)
_MAX_FAILURES = 6
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


def inspection_page(overview: Overview) -> str:
    """Return the overview as one self-contained page."""
    about = overview.about
    subtitle = f"{about['family']} on {about['robot']}, data set {about['data']}"
    if about["policy"]:
        subtitle = f"{about['policy']}: {subtitle}"
    return page_text("Why it does that", subtitle, list(_cards(overview)), sections(overview))


def sections(overview: Overview) -> dict[str, Markup]:
    """Return all sections by title."""
    cameras = overview.about["cameras"]
    shown = {
        "Conclusions": verdicts(overview.verdicts),
        "What each input changes": influence(overview),
    }
    if any(one.maps for one in overview.moments):
        shown["Where it looks"] = where_it_looks(overview)
    if overview.live is not None:
        shown["Training against live"] = live_section(overview.live)
    if overview.open_loop:
        shown["Along an episode"] = open_loop_section(overview.open_loop, cameras)
    shown["Moments"] = moments(overview)
    if overview.inside is not None:
        names = overview.about["action_names"]
        shown["Inside one inference"] = inside_section(overview.inside, names, cameras)
    return shown


def why(policy: Policy, evaluations: Sequence[Evaluation]) -> Markup:
    """Return the section of a run's page: a short overview, and the moments before failures."""
    with data_may_be_missing():
        frames = Frames.open(policy, policy.data.repo_id or "", policy.data.episodes)
        overview = compute(policy, frames, plan=_SHORT)
    failures = {}
    for evaluation in evaluations:
        if evaluation.failures is not None:
            with data_may_be_missing():
                found = _before_failures(policy, Frames.open(policy, evaluation.failures))
            failures[evaluation.name] = _moments(found)
    return render(
        "why.html",
        robot=policy.data.entry,  # in a mixture, the first one
        verdicts=verdicts(overview.verdicts),
        influence=influence(overview),
        where_it_looks=where_it_looks(overview),
        failures=failures,
    )


def _before_failures(policy: Policy, frames: Frames) -> Overview:
    """Ask about the last request of each episode that failed, and the one in the middle."""
    places = [
        (episode, place)
        for episode, length in frames.episodes.items()
        for place in sorted({length // 2, length - 1})
    ]
    return compute(policy, frames, plan=_SHORT, places=places[:_MAX_FAILURES])


def _cards(overview: Overview) -> Iterator[Card]:
    about = overview.about
    problems = sum(one.severity == "problem" for one in overview.verdicts)
    remarks = len(overview.verdicts) - problems
    yield Card("problems", str(problems), f"and {remarks} remark{'s' * (remarks != 1)}")
    frames = len(overview.moments)
    yield Card("frames asked", str(frames), f"of {about['num_frames']:,} in the data set")
    if about["num_steps"] is not None:
        steps = f"of noise; {about['num_steps']} denoising steps"
        yield Card("seeds", str(about["num_seeds"]), steps)
    actions = f"{len(about['action_names'])} actions each"
    yield Card("steps of a chunk", str(about["num_actions"]), actions)
    where = f"{about['family']} on {about['device']}"
    yield Card("parameters", short(about["num_parameters"]), where)


def verdicts(found: Sequence[Verdict]) -> Markup:
    """Return the conclusions in sentences, problems first."""
    return render("verdicts.html", verdicts=found)


def influence(overview: Overview) -> Markup:
    """Return what every change of an input does to every action."""
    found = overview.influence
    effects, strengths = found.change_in_spreads, found.strength_in_spreads
    in_spreads = effects is not None and strengths is not None
    if effects is None or strengths is None:
        effects, strengths = found.change, found.strength
    cells = effects.mean(1)
    groups = {
        title: [(name, strengths[number], cells[number]) for number, name in rows.items()]
        for title, input in (("Cameras", "camera"), ("Sentence", "sentence"), ("State", "state"))
        if (rows := _rows(found, input))
    }
    return render(
        "influence.html",
        found=found,
        num_steps=effects.shape[1],
        in_spreads=in_spreads,
        groups=groups,
        sentences=_words(found, overview.moments, strengths),
        over_steps=_over_steps(found, effects),
        carried=_carried(found),
        skipped=[(_described(found, one), reason) for one, reason in found.skipped],
    )


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


def _words(
    found: Influence, shown: Sequence[Moment], strengths: Float[np.ndarray, " q"]
) -> list[list[tuple[str, float]]]:
    """Return the words of each sentence with what leaving it out changes, NaN if not asked."""
    known = {
        question.subject: float(strengths[number])
        for number, question in enumerate(found.questions)
        if question.input == "word"
    }
    prompts = dict.fromkeys(moment.prompt for moment in shown) if known else ()
    sentences = [prompt.split() for prompt in prompts]
    return [
        [(word, known.get(subject, math.nan)) for word, subject in zip(words, word_subjects(words))]
        for words in sentences
    ]


def _over_steps(
    found: Influence, effects: Float[np.ndarray, "q h a"]
) -> list[tuple[Markup, list[tuple[str, str]]]]:
    """Return plots of the effects along the chunk, averaged over the actions, and their legends."""
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
            entries = [(line.look, line.name) for line in lines]
            figures.append((small_plot(input, lines, _STEPS, from_zero=True), entries))
    return figures


def _carried(found: Influence) -> list[Markup]:
    """Return plots of how much of an error of the state remains in the targets."""
    steps = np.arange(found.carried.shape[1]) if found.carried_names else np.empty(0)
    zero = Line(steps, np.zeros(len(steps)), "fade")
    return [
        small_plot(name, [Line(steps, values), zero], _STEPS)
        for name, values in zip(found.carried_names, found.carried)
    ]


def where_it_looks(overview: Overview) -> Markup:
    """Return the pictures with what covering each part changes laid over."""
    maps = [picture for one in overview.moments for picture in _maps(overview, one)]
    return render("where_it_looks.html", maps=maps)


def _maps(overview: Overview, one: Moment) -> list[tuple[str, UInt8[np.ndarray, "_ _ 3"]]]:
    """Return the maps of a frame over its pictures, with a text each."""
    found = []
    for map in one.maps:
        name = overview.about["cameras"].get(map.camera, map.camera)
        text = f"{name}, episode {one.episode}, frame {one.frame}: {map.effect.max():.2g}"
        found.append((text, overlay_map(one.pictures[map.camera], map)))
    return found


def moments(overview: Overview) -> Markup:
    """Return the frames that were asked about: pictures, chunks, and what matters there."""
    return render("moments.html", moments=_moments(overview))


def _moments(overview: Overview) -> list[dict[str, Any]]:
    """Return what the templates show of each frame."""
    found = overview.influence
    return [
        {
            "moment": one,
            "pictures": [
                (overview.about["cameras"].get(slot, slot), pixels)
                for slot, pixels in one.pictures.items()
            ],
            "maps": _maps(overview, one),
            "strongest": _strongest(found, number),
            "unit": "standard deviations" if found.noise_per_frame is None else "spreads",
            "figures": _chunk(one, overview.about["action_names"]),
        }
        for number, one in enumerate(overview.moments)
    ]


def _chunk(one: Moment, names: Sequence[str]) -> list[Markup]:
    """Return plots of the actions that move most: predicted, with noise, and recorded."""
    steps = np.arange(len(one.predicted))
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
        figures.append(small_plot(names[dim], lines, _STEPS, widest=widest))
    return figures


def _strongest(found: Influence, number: int) -> list[tuple[str, float]]:
    """Return the changes that move the actions most in one frame, in spreads if there are."""
    values = found.strength_per_frame[number]
    if found.noise_per_frame is not None:
        values = values / max(found.noise_per_frame[number], 1e-9)
    order = np.argsort(-np.nan_to_num(values), kind="stable")[:_NUM_STRONGEST]
    return [(_described(found, found.questions[one]), float(values[one])) for one in order]

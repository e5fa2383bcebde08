"""Evaluations: how every episode ended, videos, executed chunks; and an animation of the videos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw

from piston.report.document import Missing, render, small_plot
from piston.report.figures import Line
from piston.sim.scores import RESULTS, Evaluation, Outcome, Rate, Trace, read_evaluation

_ENDINGS = {
    "held": "success that lasted to the end",
    "lost": "success that did not last",
    "failed": "failure",
}
# Of one video, in the animation.
_WIDTH, _HEIGHT, _BORDER = 240, 180, 3
_ONE_ROW, _COLUMNS, _STRIP = 4, 3, 24
# Every so-many-th frame is shown, at the videos' own frame rate: as many times faster.
_SPEED = 2
_SECONDS_AT_THE_END = 1.5
_SUCCESS, _FAILURE, _OPPOSITE = (46, 139, 87), (200, 60, 50), (130, 130, 130)
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
MAX_BYTES = 1_000_000
_QUALITIES = (70, 50, 35, 20, 10)


def find_evaluations(run: Path, given: Sequence[Path] = ()) -> list[Evaluation]:
    """Read the evaluations in the given folders; without any, those directly below the run."""
    folders = given or sorted(path.parent for path in run.glob(f"*/{RESULTS}"))
    return [read_evaluation(folder) for folder in folders]


def success(evaluations: Sequence[Evaluation]) -> Markup:
    """Return the section with the outcome of every episode."""
    found = []
    for evaluation in evaluations:
        prompts = [
            (prompt, Rate.of(outcomes), [(one, _ending(one), _described(one)) for one in outcomes])
            for prompt, outcomes in evaluation.by_prompt.items()
        ]
        found.append((evaluation, _delayed(evaluation), prompts))
    return render("success.html", endings=_ENDINGS, evaluations=found)


# What a robot does while its policy computes.
_EXECUTIONS = {
    "wait": "waited for",
    "async": "went on with its chunk during",
    "guided": "went on during, with guided real-time chunking,",
    "trained": "went on during, with trained real-time chunking,",
}


def _delayed(evaluation: Evaluation) -> str:
    """Return a sentence about the delay of answers; nothing if there was none."""
    if evaluation.delay == 0:
        return ""
    steps = f"{evaluation.delay} steps" if evaluation.delay else "the steps that inference took"
    did = _EXECUTIONS.get(evaluation.execution, evaluation.execution)
    jump, inner = evaluation.mean_of("seam_jump"), evaluation.mean_of("inner_jump")
    return (
        f"The robot {did} {steps} between a request and its answer; the largest change of an "
        f"action from one step to the next was {jump:.3f} onto a new chunk and {inner:.3f} within "
        "chunks, on average."
    )


def _ending(outcome: Outcome) -> str:
    if not outcome.success:
        return "failed"
    return "held" if outcome.held else "lost"


def _described(outcome: Outcome) -> str:
    ending = _ENDINGS[_ending(outcome)]
    return f"seed {outcome.seed}: {ending}; {outcome.steps} steps; “{outcome.prompt}”"


def videos(evaluations: Sequence[Evaluation]) -> Markup:
    filmed = [evaluation for evaluation in evaluations if evaluation.videos]
    if not filmed:
        raise Missing("there are no videos. Evaluate with: piston eval … --video")
    films = [
        (
            evaluation.name,
            [
                (path.read_bytes(), _described(evaluation.outcome_of(path)))
                for path in evaluation.videos
            ],
        )
        for evaluation in filmed
    ]
    return render("videos.html", evaluations=films)


def executed(evaluations: Sequence[Evaluation]) -> Markup:
    """Return the section with the chunks of one episode and what was executed of them."""
    traced = ((evaluation, evaluation.trace) for evaluation in evaluations)
    result, trace = next((pair for pair in traced if pair[1] is not None), (None, None))
    if result is None or trace is None:
        raise Missing("the evaluation was written by a version that did not keep the actions.")
    horizon = trace.chunks.shape[1]
    widest = float(np.ptp(trace.executed, axis=0).max())
    figures = []
    for dim, done in enumerate(trace.executed.T):
        lines = [
            Line((start + np.arange(horizon)) / trace.hz, chunk[:, dim], "accent", opacity=0.6)
            for start, chunk in zip(trace.starts, trace.chunks)
        ]
        lines.append(Line(np.arange(len(done)) / trace.hz, done, "ink"))
        figures.append(small_plot(trace.names[dim], lines, widest=widest))
    return render(
        "executed.html",
        trace=trace,
        result=result,
        horizon=horizon,
        figures=figures,
        subtasks=_subtasks(trace),
    )


def _subtasks(trace: Trace) -> list[tuple[str, int, str]]:
    """Return a row for each of the subtasks along the episode, if the policy has any."""
    rows, first = [], 0
    ends = [*trace.starts[1:], len(trace.executed)]
    for subtask, chunks in itertools.groupby(trace.subtasks):
        count = len(list(chunks))
        begin, end = (step / trace.hz for step in (trace.starts[first], ends[first + count - 1]))
        rows.append((f"{begin:.1f} – {end:.1f} s", count, subtask or "–"))
        first += count
    return rows


def write_animation(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write all videos side by side as WebP of at most a million bytes.

    Frames are green where the task was fulfilled, red where it was not, and grey where the opposite
    was asked for. A video that is over shows its last frame.
    """
    videos = [(result, video) for result in evaluations for video in result.videos]
    if path.suffix != ".webp":
        raise ValueError(f"The animation is WebP: name it …webp, not {path.name}.")
    if not videos:
        raise ValueError("There are no videos to animate. Run: piston eval … --video")
    films, rates = [], []
    for result, video in videos:
        colour = _SUCCESS if result.outcome_of(video).success else _FAILURE
        with av.open(str(video)) as container:
            rates.append(float(container.streams.video[0].average_rate or 10))
            chosen = itertools.islice(container.decode(video=0), 0, None, _SPEED)
            films.append([_tile(one, _OPPOSITE if result.opposite else colour) for one in chosen])
    captions = (
        f"{'asked for the opposite (grey)' if result.opposite else result.task}: {result.success}"
        for result in evaluations
    )
    title = f"{'   '.join(captions)}   {_SPEED} times as fast"
    columns = len(films) if len(films) <= _ONE_ROW else _COLUMNS
    bottom = -(-len(films) // columns) * _HEIGHT
    pages = []
    for index in range(max(map(len, films))):
        page = Image.new("RGB", (columns * _WIDTH, bottom + _STRIP), _PAPER)
        for place, tiles in enumerate(films):
            row, column = divmod(place, columns)
            page.paste(tiles[min(index, len(tiles) - 1)], (column * _WIDTH, row * _HEIGHT))
        ImageDraw.Draw(page).text((6, bottom + 6), title, fill=_INK)
        pages.append(page)
    durations = [round(1000 / rates[0])] * (len(pages) - 1) + [round(1000 * _SECONDS_AT_THE_END)]
    options = {"append_images": pages[1:], "duration": durations, "loop": 0, "method": 4}
    path.parent.mkdir(parents=True, exist_ok=True)
    for quality in _QUALITIES:
        pages[0].save(path, "WEBP", save_all=True, quality=quality, **options)
        if path.stat().st_size <= MAX_BYTES:
            return
    raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}.")


def _tile(frame: av.VideoFrame, colour: tuple[int, int, int]) -> Image.Image:
    inner = frame.to_image().resize((_WIDTH, _HEIGHT))
    ImageDraw.Draw(inner).rectangle((0, 0, _WIDTH - 1, _HEIGHT - 1), outline=colour, width=_BORDER)
    return inner

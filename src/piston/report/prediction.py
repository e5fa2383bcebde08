"""What the run's newest policy predicts for one sample, how it denoises, and how long it takes.

Dims: n noise samples, k steps of the integrator, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from piston.inference.policy import Policy
from piston.inspection.inside import denoise
from piston.inspection.probe import Intervention, Probe
from piston.inspection.results import evenly
from piston.report.document import Missing, render, small_plot
from piston.report.figures import Line, heat_map
from piston.report.transforms import Sample, TraceStep, follow
from piston.sim.scores import latency_percentiles

_NUM_DRAWS = 4
# A full-size model on a CPU takes seconds per inference: measure as often as this allows.
_MAX_TIMED, _TIMING_SECONDS = 20, 3.0
_NUM_JOINTS_DENOISED = 6
_MAX_PICTURES = 11
_NOISE_LIMIT = 2.5  # standard deviations at which colours end


@dataclasses.dataclass(frozen=True)
class Prediction:
    policy: Policy
    # In the robot's space; the first draw is the one whose denoising is shown.
    chunks: Float[np.ndarray, "n h a"]
    # From noise (first) to actions (last), in the model's space, without padded dimensions. None
    # for a model that does not denoise.
    denoised: Float[np.ndarray, "k h a"] | None
    # From the model's actions to the robot's.
    back: tuple[TraceStep, ...]
    # Of single requests in this process.
    latency_ms: Mapping[str, float]
    num_timed: int
    # That the policy wrote, if it has subtasks.
    subtask: str | None = None


def predict(policy: Policy, sample: Sample) -> Prediction:
    probe = Probe(policy, range(_NUM_DRAWS))
    chunks = probe.chunks(sample.at, [Intervention()])[0]
    sample.at.error(chunks)  # Raises ValueError if they cannot be compared.
    denoised: np.ndarray | None = None
    back: tuple[TraceStep, ...] = ()
    if probe.noise is not None:
        inputs = policy.prepare(sample.at.observation).inputs
        denoised, _ = denoise(policy, inputs, probe.noise[0])
        actions = {"state": sample.seen_by_model["state"], "actions": denoised[-1]}
        back = follow({"to the robot": sample.pipeline.output_transforms()}, actions)
        denoised = denoised[..., : chunks.shape[-1]]
    seconds: list[float] = []
    subtask: str | None = None
    began = time.perf_counter()
    while len(seconds) < _MAX_TIMED and time.perf_counter() - began < _TIMING_SECONDS:
        answer = policy.infer(sample.at.observation)
        seconds.append(answer["policy_timing"]["infer_ms"] / 1e3)
        subtask = answer.get("subtask")
    return Prediction(
        policy=policy,
        chunks=chunks,
        denoised=denoised,
        back=back,
        latency_ms=latency_percentiles(seconds),
        num_timed=len(seconds),
        subtask=subtask,
    )


def chunk(sample: Sample, prediction: Prediction) -> Markup:
    """Return the section with the policy's chunks against what was recorded."""
    at = sample.at
    errors = np.abs(at.error(prediction.chunks[0]))
    seconds = np.arange(len(at.recorded)) / sample.fps
    widest = float(np.ptp(at.recorded[at.is_real], axis=0).max())
    figures = []
    for dim, name in enumerate(sample.names):
        recorded, chunks = at.recorded[:, dim], prediction.chunks[:, :, dim]
        # Behind the end of the episode nothing was recorded.
        real = np.where(at.is_real, recorded, np.nan)
        lines = [Line(seconds, one, "accent", opacity=0.35) for one in chunks[1:]]
        lines += [Line(seconds, chunks[0], "accent"), Line(seconds, real, "ink")]
        figures.append(
            small_plot(name, lines, value=f"{np.nanmean(errors[:, dim]):.2g}", widest=widest)
        )
    recorded_subtask = sample.trace[0].data.get("subtask") or "none"
    return render(
        "chunk.html",
        sample=sample,
        prediction=prediction,
        recorded_subtask=recorded_subtask,
        figures=figures,
    )


def denoising(sample: Sample, prediction: Prediction) -> Markup:
    """Return the section that shows how noise became the first chunk."""
    path = prediction.denoised
    if path is None:
        family = prediction.policy.model.config.family
        raise Missing(f"{family} writes tokens and does not denoise.")
    recorded = np.asarray(sample.seen_by_model["actions"])[:, : path.shape[-1]]
    return denoising_figure(path, recorded, sample.names)


def denoising_figure(
    path: Float[np.ndarray, "k h a"], recorded: Float[np.ndarray, "h a"], names: Sequence[str]
) -> Markup:
    last, horizon = len(path) - 1, path.shape[1]
    chosen = evenly(len(path), _MAX_PICTURES)
    shown = {f"time {1 - step / last:.2g}": path[step] for step in chosen} | {"recorded": recorded}
    steps, figures = np.arange(horizon), []
    moving = np.argsort(-np.ptp(recorded, axis=0), kind="stable")[:_NUM_JOINTS_DENOISED]
    for dim in sorted(moving.tolist()):
        lines = [
            Line(steps, values[:, dim], "fade", opacity=0.25 + 0.6 * step / last)
            for step, values in enumerate(path[:-1])
        ]
        lines.append(Line(steps, recorded[:, dim], "ink"))
        lines.append(Line(steps, path[-1, :, dim], "accent"))
        figures.append(small_plot(names[dim], lines, "step of the chunk"))
    return render(
        "denoising.html",
        horizon=horizon,
        limit=_NOISE_LIMIT,
        pictures={name: heat_map(values.T, _NOISE_LIMIT) for name, values in shown.items()},
        figures=figures,
    )

"""What the run's newest policy predicts for one sample, how it denoises, and how long it takes.

Dims: n draws of noise, k steps of the integrator, h horizon, a action dim.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from piston.config import DataConfig
from piston.inference.policy import Policy
from piston.observation import Observation
from piston.report.markup import (
    Line,
    Markup,
    Missing,
    heat_map,
    image,
    multiples,
    png,
    small_plot,
    tag,
)
from piston.report.transforms import Sample, TraceStep, follow

_NUM_DRAWS = 4
_SEED = 0
# A full-size model on a CPU takes seconds per inference: measure as often as this allows.
_MAX_TIMED, _TIMING_SECONDS = 20, 3.0
_NUM_JOINTS_DENOISED = 6
_MAX_PICTURES = 11
_NOISE_LIMIT = 2.5  # standard deviations at which colours end


@dataclasses.dataclass(frozen=True)
class Denoising:
    """How noise became a chunk, in the model's space, without padded dimensions."""

    # From noise (first) to actions (last).
    passed: Float[np.ndarray, "k h a"]
    recorded: Float[np.ndarray, "h a"]
    # From the model's actions to the robot's.
    trace: tuple[TraceStep, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
    # The model's.
    family: str
    num_parameters: int
    device: str
    # In the robot's space; the first draw is the one whose denoising is shown.
    chunks: Float[np.ndarray, "n h a"]
    # None for a model that does not denoise.
    denoising: Denoising | None
    infer_ms: tuple[float, ...]


def predict(policy: Policy, pipeline: DataConfig, sample: Sample) -> Prediction:
    model = policy.model
    shape = (model.config.action_horizon, model.config.action_dim)
    noise = np.random.default_rng(_SEED).standard_normal((_NUM_DRAWS, *shape), np.float32)
    if model.config.denoises:
        requests = [{**sample.observation, "noise": one} for one in noise]
    else:
        requests = [sample.observation]
    chunks = np.stack([answer["actions"] for answer in policy.infer_batch(requests)])
    if chunks.shape[1:] != sample.recorded.shape:
        raise ValueError(
            f"The policy's chunks are {chunks.shape[1:]} (steps, dimensions), the recorded ones "
            f"{sample.recorded.shape}: they cannot be compared."
        )
    return Prediction(
        family=model.config.family,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=str(policy.device),
        chunks=chunks,
        denoising=_denoising(policy, pipeline, sample, noise[0]),
        infer_ms=_timed(policy, requests[0]),
    )


def _denoising(
    policy: Policy, pipeline: DataConfig, sample: Sample, noise: np.ndarray
) -> Denoising | None:
    model = policy.model
    if not model.config.denoises:
        return None
    seen = sample.seen_by_model
    observation = Observation.from_dict(_batch_of_one(seen)).to(policy.device)
    path: list[Tensor] = []
    start = torch.from_numpy(noise)[None].to(policy.device)
    model.act(observation, start, num_steps=policy.num_steps, visit=path.append)
    passed = torch.cat(path).cpu().numpy()
    outputs = pipeline.output_transforms()
    trace = follow({"to the robot": outputs}, {"state": seen["state"], "actions": passed[-1]})
    dim = sample.recorded.shape[-1]
    return Denoising(passed[..., :dim], np.asarray(seen["actions"])[:, :dim], trace)


def _batch_of_one(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _batch_of_one(value) if isinstance(value, Mapping) else np.asarray(value)[None]
        for key, value in data.items()
    }


def _timed(policy: Policy, request: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the milliseconds of single requests in this process, after a warm-up."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _MAX_TIMED and time.perf_counter() - began < _TIMING_SECONDS:
        times.append(policy.infer(request)["policy_timing"]["infer_ms"])
    return tuple(times)


def chunk(sample: Sample, prediction: Prediction) -> Markup:
    """Return the section with the policy's chunks against what was recorded."""
    draws = len(prediction.chunks)
    known = "held out of training" if sample.held_out else "part of what was trained on"
    text = (
        f"Episode {sample.episode}, frame {sample.frame} of {sample.repo_id} ({known}). Lines show "
        f"{draws} chunk{'s' * (draws > 1)} of {len(sample.recorded)} steps "
        f"({len(sample.recorded) / sample.fps:.1f} s), from as many draws of noise, in the robot's "
        "own space. The number is the mean distance of the first from what was recorded."
    )
    seconds = np.arange(len(sample.recorded)) / sample.fps
    widest = float(np.ptp(sample.recorded[sample.is_real], axis=0).max())
    figures = []
    for dim, name in enumerate(sample.names):
        recorded, chunks = sample.recorded[:, dim], prediction.chunks[:, :, dim]
        error = np.abs(chunks[0] - recorded)[sample.is_real].mean()
        # Behind the end of the episode nothing was recorded.
        real = np.where(sample.is_real, recorded, np.nan)
        lines = [Line(seconds, one, "accent", opacity=0.35) for one in chunks[1:]]
        lines += [Line(seconds, chunks[0], "accent"), Line(seconds, real, "ink")]
        figures.append(small_plot(name, lines, value=f"{error:.2g}", widest=widest))
    return multiples(text, [("ink", "recorded"), ("accent", "policy")], figures)


def denoising(sample: Sample, prediction: Prediction) -> Markup | Missing:
    """Return the section that shows how noise became the first chunk."""
    if prediction.denoising is None:
        return Missing(f"{prediction.family} writes tokens and does not denoise.")
    shown = prediction.denoising
    text = (
        "The same frame in the model's space (normalised). Time 1 is noise, time 0 the actions. "
        f"In the pictures a row is a dimension, a column one of {shown.recorded.shape[0]} steps of "
        f"the chunk; blue is −{_NOISE_LIMIT:g}, orange +{_NOISE_LIMIT:g}. Below, the "
        "dimensions that move most."
    )
    last = len(shown.passed) - 1
    chosen = np.unique(np.linspace(0, last, min(_MAX_PICTURES, last + 1)).round().astype(int))
    pictures = [_heat(shown.passed[step], f"time {1 - step / last:.2g}") for step in chosen]
    strip = tag("div", *pictures, _heat(shown.recorded, "recorded"), class_="strip")
    looks = [("ink", "recorded"), ("accent", "actions (time 0)"), ("fade", "on the way")]
    return multiples(text, looks, _most_moving(sample, shown), strip)


def _heat(values: np.ndarray, text: str) -> Markup:
    source = png(heat_map(values.T, _NOISE_LIMIT))
    return tag("figure", image(source, text), tag("figcaption", text))


def _most_moving(sample: Sample, shown: Denoising) -> list[Markup]:
    order = np.argsort(-np.ptp(shown.recorded, axis=0), kind="stable")
    figures = []
    for dim in sorted(order[:_NUM_JOINTS_DENOISED].tolist()):
        steps, last = np.arange(len(shown.recorded)), len(shown.passed) - 1
        lines = [
            Line(steps, shown.passed[step, :, dim], "fade", opacity=0.25 + 0.6 * step / last)
            for step in range(last)
        ]
        lines.append(Line(steps, shown.recorded[:, dim], "ink"))
        lines.append(Line(steps, shown.passed[-1, :, dim], "accent"))
        figures.append(small_plot(sample.names[dim], lines, "step of the chunk"))
    return figures

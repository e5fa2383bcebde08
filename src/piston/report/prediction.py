"""What the run's newest policy makes of one sample: chunks, their denoising, and how long it takes.

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
from piston.report.sample import Sample, TraceStep, follow

_NUM_DRAWS = 4
_SEED = 0
# A full-size model on a CPU takes seconds per inference: measure as often as this allows.
_MAX_TIMED, _TIMING_SECONDS = 20, 3.0


@dataclasses.dataclass(frozen=True)
class Denoising:
    """In the model's space, without the dimensions that the robot does not have."""

    # From noise (first) to actions (last).
    passed: Float[np.ndarray, "k h a"]
    recorded: Float[np.ndarray, "h a"]
    # From the model's actions to the robot's.
    trace: tuple[TraceStep, ...]


@dataclasses.dataclass(frozen=True)
class Prediction:
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
    """Milliseconds of single requests in this process; the caller has warmed up."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _MAX_TIMED and time.perf_counter() - began < _TIMING_SECONDS:
        times.append(policy.infer(request)["policy_timing"]["infer_ms"])
    return tuple(times)

"""Model cases: folders with small weights (Orbax, often also safetensors), inputs and outputs.

Every quantity is checked once per source of weights. Training steps of a case run through the
trainer's own optimizer and mean of weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from piston import weights
from piston.config import AdamW, CosineDecaySchedule
from piston.models import masks
from piston.models.flow import Pi0
from piston.models.model import Model
from piston.observation import Observation
from piston.training.optimizer import EMA, clip_gradients, optimizer_step
from piston.verification import Quantity, close, equal, failed
from piston.weights import openpi_jax

_ABSOLUTE, _RELATIVE, _GRADIENT = 1e-4, 1e-4, 1e-3
_SOURCES = {"orbax": "params", "safetensors": "model.safetensors"}
_FAMILIES = ("pi0", "pi05", "pi0_fast")
_END = 1
_Arrays = Mapping[str, np.ndarray]


def replay_model(path: Path) -> Iterator[Quantity]:
    facts = json.loads((path / "config.json").read_text())
    arrays = dict(np.load(path / "case.npz"))
    if facts["model"] not in _FAMILIES:
        raise ValueError(f"model is {facts['model']!r}; known are {', '.join(_FAMILIES)}.")
    present = {source: name for source, name in _SOURCES.items() if (path / name).exists()}
    if not present:
        yield failed("weights", f"neither {' nor '.join(_SOURCES.values())} is there")
    for source, name in present.items():
        for quantity in _replay_source(path / name, facts, arrays):
            yield dataclasses.replace(quantity, name=f"{source} {quantity.name}")


def _replay_source(tensors: Path, facts: Mapping[str, Any], arrays: _Arrays) -> Iterator[Quantity]:
    # The sizes are those of the case's config.json, which open_checkpoint reads.
    config = dataclasses.replace(weights.open_checkpoint(tensors).config, dtype="float32")
    model = weights.load_model(tensors, config, dtype=torch.float32)
    if not config.denoises:
        yield from _autoregressive(model, arrays)
        return
    yield from _flow(cast(Pi0, model), facts["num_steps"], arrays)
    training = tensors.with_name("training.json")
    if training.is_file():  # the comparisons above change no weights
        yield from _training(model, json.loads(training.read_text()), arrays)


def observation_of(arrays: _Arrays, prompt: str = "in") -> Observation:
    batch: dict[str, Any] = {"image": {}, "image_mask": {}}
    for name, value in arrays.items():
        match name.split("/"):
            case ["in", "image" | "image_mask" as part, camera]:
                batch[part][camera] = value
            case ["in", "state"]:
                batch["state"] = value
            case [place, key] if place == prompt and key.startswith("token"):
                batch[key] = value
    return Observation.from_dict(batch)


def _inputs(arrays: _Arrays) -> Iterator[Tensor]:
    return (torch.from_numpy(arrays[f"in/{name}"]) for name in ("actions", "noise", "time"))


def _autoregressive(model: Model, arrays: _Arrays) -> Iterator[Quantity]:
    with torch.no_grad():
        loss = model.training_losses(observation_of(arrays), None, {})["tokens"]
    yield close("loss", loss, arrays["out/loss"], _RELATIVE, relative=True)
    expected = arrays["out/greedy_tokens"].astype(np.int64)
    tokens = np.zeros_like(expected)
    observation = observation_of(arrays, "decode_in")
    generated = model.act(observation, num_steps=expected.shape[1]).numpy()
    tokens[:, : generated.shape[1]] = generated
    # openpi goes on in rows that have ended until all have; those tokens mean nothing.
    counts = np.cumsum(expected == _END, axis=1) - (expected == _END) == 0
    yield equal("greedy tokens", tokens[counts], expected[counts])


@torch.no_grad()
def _flow(model: Pi0, num_steps: int, arrays: _Arrays) -> Iterator[Quantity]:
    observation = observation_of(arrays)
    actions, noise, time = _inputs(arrays)
    # The prefix is compared in its unpacked layout, where a token is valid.
    prefix, suffix = model.embed_prefix(observation), model.starts_block(observation.device)
    valid = prefix.packing.valid
    starts = torch.cat((torch.zeros(valid.shape[1], dtype=torch.bool), suffix))
    everything = torch.cat((valid, valid.new_ones(len(valid), len(suffix))), dim=1)
    yield equal("attn_mask", masks.block_mask(everything, starts[None]), arrays["out/attn_mask"])
    yield equal("positions", masks.positions(everything), arrays["out/positions"])
    cache, t = model.prefill(observation), time[:, None, None]
    noisy = t * noise + (1 - t) * actions
    for name, actual in {
        "prefix_tokens": prefix.packing.unpack(prefix.tokens)[valid],
        "prefix_out": model.prefix_output(observation)[valid],
        "suffix_out": model.suffix_output(noisy, time, cache),
        "velocity": model.velocity(noisy, time, cache),
        "sampled_actions": model.act(observation, noise, num_steps=num_steps),
    }.items():
        expected = arrays[f"out/{name}"]
        if name.startswith("prefix"):
            expected = expected[valid.numpy()]
        yield close(name, actual, expected, _ABSOLUTE)
    yield close("loss", _losses(model, arrays), arrays["out/loss"], _RELATIVE, relative=True)


def _losses(model: Model, arrays: _Arrays) -> Float[Tensor, "b h"]:
    """Return the loss of each step of the case's chunks, with the case's noise and time."""
    actions, noise, time = _inputs(arrays)
    draws = {"noise": noise[:, None], "time": time[:, None]}
    return model.training_losses(observation_of(arrays), actions, draws)["velocity"].mean(-1)


def _training(model: Model, steps: Mapping[str, Any], arrays: _Arrays) -> Iterator[Quantity]:
    schedule = CosineDecaySchedule(**steps["schedule"])
    settings = AdamW(**steps["optimizer"])
    parameters = dict(model.named_parameters())
    optimizer = settings.build(parameters.items())
    ema = EMA(parameters, steps["ema_decay"])
    losses, norms = [], []
    for step in range(len(steps["losses_before_each_step"])):
        optimizer.zero_grad()
        loss = _losses(model, arrays).mean()
        loss.backward()
        if step == 0:
            yield from _gradients(model, steps["grad_l2"])
        losses.append(loss.item())
        norm = clip_gradients(parameters.values(), settings.clip_gradient_norm)
        norms.append(norm.item())
        optimizer_step(optimizer, schedule(step), norm.isfinite())
        ema.update(norm.isfinite())
    yield close("losses", losses, steps["losses_before_each_step"], _RELATIVE, relative=True)
    yield close("gradient norms", norms, steps["grad_norms"], _GRADIENT, relative=True)
    with torch.no_grad():
        after = _losses(model, arrays).mean().item()
        with ema.applied():
            of_mean = _losses(model, arrays).mean().item()
    yield close("loss after", after, steps[f"loss_after_{len(losses)}_steps"], _RELATIVE, True)
    expected = steps[f"ema_loss_after_{len(losses)}_steps"]
    yield close("loss of the mean", of_mean, expected, _RELATIVE, relative=True)


def _gradients(model: Model, expected: Mapping[str, float]) -> Iterator[Quantity]:
    """Compare L2 norms per JAX array, which stacks layers and joins key and value, gate and up."""
    squares = {
        name: 0.0 if p.grad is None else p.grad.double().square().sum().item()
        for name, p in model.named_parameters()
    }
    # As `allclose` does: a gradient that is zero up to rounding (a key's bias, which does not
    # change the softmax) has no meaningful relative error.
    rounding = float(np.finfo(np.float32).eps) * max(expected.values())
    errors = {}
    for path, norm in expected.items():
        patterns = openpi_jax.TABLE[path].names
        parts = [n for n in squares if any(fnmatchcase(n, pattern) for pattern in patterns)]
        found = math.sqrt(sum(squares[name] for name in parts))
        errors[path] = abs(found - norm) / (norm + rounding / _GRADIENT)
    worst = max(errors, key=lambda path: errors[path])
    yield Quantity(
        f"{len(errors)} gradients", errors[worst], _GRADIENT, f"relative; worst: {worst}"
    )

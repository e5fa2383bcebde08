"""Inputs of a wrong shape are named; cameras of different kinds mean what each says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from . import tiny

ALL = [True] * 3


@pytest.fixture(params=[False, True], ids=["pi0", "pi05"])
def model(request):
    return tiny.flow(pi05=request.param)


def test_shapes_are_checked_before_anything_runs(model):
    observation = tiny.observe(model, [ALL] * 2, [4, 3])
    chunk, time = tiny.chunk(model, 2), torch.full((2,), 0.5)
    wrong = {
        "horizon": chunk[:, 1:],
        "action dim": chunk[..., 1:],
        "batch": chunk[:1],
        "axes": chunk[0],
    }
    cache = model.prefill(observation)
    for value in wrong.values():
        with pytest.raises(ValueError, match=r"actions has shape .*expected \(2, 4, 5\)"):
            tiny.loss(model, observation, value, chunk, time)
        with pytest.raises(ValueError, match=r"noise has shape .*expected \(2, "):
            tiny.loss(model, observation, chunk, value, time)
        with pytest.raises(ValueError, match=r"noise has shape .*expected \(2, 4, 5\)"):
            model.act(observation, value)
        with pytest.raises(ValueError, match=r"noisy_actions has shape .*expected \(2, 4, 5\)"):
            model.velocity(value, time, cache)
    for value in (time[:, None], torch.ones(3), torch.tensor(0.5)):
        with pytest.raises(ValueError, match="time has shape"):
            model.velocity(chunk, value, cache)
    with pytest.raises(ValueError, match="time has shape"):
        tiny.loss(model, observation, chunk, chunk, time[:1])
    with pytest.raises(ValueError, match="num_draws must be at least 1, is 0"):
        model.draw(2, num_draws=0)


def test_a_state_of_another_width_is_refused_where_it_is_read():
    for pi05 in (False, True):
        model = tiny.flow(pi05=pi05)
        observation = tiny.observe(model, [ALL], [4])
        narrow = dataclasses.replace(observation, state=observation.state[:, :3])
        if pi05:
            noise = tiny.chunk(model, 1)
            expected = model.act(observation, noise)
            assert torch.equal(model.act(narrow, noise), expected)
        else:
            with pytest.raises(ValueError, match=r"state has shape \(1, 3\), expected .*5"):
                model.prefill(narrow)


def test_cameras_of_bytes_and_of_floats_mix(model):
    """Bytes beside floats mean bytes still, not floats of up to 255."""
    observation = tiny.observe(model, [ALL], [4])
    floats = {name: image.float() / 127.5 - 1 for name, image in observation.images.items()}
    noise = tiny.chunk(model, 1)
    first = model.config.cameras[0]
    mixed = dataclasses.replace(observation, images={**observation.images, first: floats[first]})
    halves = {first: floats[first].double()}
    for images in (mixed.images, floats, {**floats, **halves}, {**observation.images, **halves}):
        found = model.act(dataclasses.replace(observation, images=images), noise)
        expected = model.act(observation, noise)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

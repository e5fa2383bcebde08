"""π0 and π0.5: every saving gives what the plain computation gives."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from piston.models.flow import Pi0
from piston.models.integrator import Guidance
from piston.models.model import ActOptions
from piston.models.precision import cast_for_inference

from . import plain, tiny

FAMILIES = pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi05"])
ALL, NONE = [True] * 3, [False] * 3
LAYOUTS = {
    "alike": ([ALL, ALL, ALL], [5, 5, 5]),
    "alike, one camera absent": ([[True, False, True]] * 2, [3, 3]),
    "cameras differ, lengths agree": ([[True, False, True], [True, True, False]], [3, 3]),
    "cameras differ": ([ALL, [True, False, False], [False, False, True]], [5, 5, 5]),
    "prompts differ": ([ALL, ALL, ALL], [1, 7, 4]),
    "both differ": ([ALL, [False, True, False], [True, False, True]], [1, 7, 3]),
    "one sample has nothing": ([[True, True, False], NONE], [4, 0]),
    "no camera at all": ([NONE, NONE], [4, 2]),
    "batch of one, prompt of one": ([[True, False, False]], [1]),
    "batch of one, full prompt": ([ALL], [7]),
    "no prompt": ([ALL, [True, False, False]], [0, 0]),
}
SIZES = {
    "wide heads": {"vlm": {"head_dim": 16}, "expert": {"head_dim": 16}},
    "narrow heads": {"vlm": {"head_dim": 2}, "expert": {"head_dim": 2}},
    "depth one": {"vlm": {"depth": 1}, "expert": {"depth": 1}},
    "two key heads": {"vlm": {"num_kv_heads": 2}, "expert": {"num_kv_heads": 2}},
    "all key heads": {"vlm": {"num_kv_heads": 4}, "expert": {"num_kv_heads": 4}},
    "expert wider": {"vlm": {"width": 10}, "expert": {"width": 22, "mlp_dim": 9}},
}


def close(actual, expected):
    assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@FAMILIES
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_velocity_and_samples_equal_the_plain_computation(pi05, layout):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, *layout)
    noise = tiny.chunk(model, observation.batch_size)
    time = torch.linspace(0.9, 0.1, observation.batch_size)
    with torch.no_grad():
        cache = model.prefill(observation)
        expected = plain.velocity(model, observation, noise, time)
        close(model.velocity(noise, time, cache), expected)
        # The suffix was written behind the prefix and not into it: again, and the same.
        close(model.velocity(noise, time, cache), expected)
        sampled = model.act(observation, noise, num_steps=4)
        close(sampled, plain.sample(model, observation, noise, 4))


@FAMILIES
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_other_sizes(pi05, sizes):
    model = tiny.flow(
        pi05=pi05, vlm=tiny.gemma(**sizes["vlm"]), action_expert=tiny.gemma(**sizes["expert"])
    )
    observation = tiny.observe(model, [ALL, [False, True, False], [True, False, True]], [2, 7, 1])
    noise, time = tiny.chunk(model, 3), torch.tensor([0.2, 1.0, 0.5])
    with torch.no_grad():
        found = model.velocity(noise, time, model.prefill(observation))
        close(found, plain.velocity(model, observation, noise, time))


@FAMILIES
@pytest.mark.parametrize("num_cameras", [1, 5])
def test_other_numbers_of_cameras(pi05, num_cameras):
    model = tiny.flow(pi05=pi05, num_cameras=num_cameras)
    present = [[True] * num_cameras, [i % 2 == 0 for i in range(num_cameras)]]
    observation = tiny.observe(model, present, [3, 6])
    noise, time = tiny.chunk(model, 2), torch.tensor([0.2, 0.7])
    with torch.no_grad():
        found = model.velocity(noise, time, model.prefill(observation))
        close(found, plain.velocity(model, observation, noise, time))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(0, 7)),
        min_size=1,
        max_size=4,
    ).filter(lambda rows: any(any(present) or length for present, length in rows)),
    pi05=st.booleans(),
)
def test_any_layout(rows, pi05):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, [row[0] for row in rows], [row[1] for row in rows])
    noise = tiny.chunk(model, len(rows))
    time = torch.linspace(0.1, 1, len(rows))
    with torch.no_grad():
        found = model.velocity(noise, time, model.prefill(observation))
        close(found, plain.velocity(model, observation, noise, time))


def test_prompt_may_be_missing_but_not_everything():
    model = tiny.flow()
    observation = tiny.observe(model, [ALL], [0])
    without = dataclasses.replace(observation, tokenized_prompt=None, tokenized_prompt_mask=None)
    noise = tiny.chunk(model, 1)
    close(model.act(without, noise), model.act(observation, noise))
    with pytest.raises(ValueError, match="no camera and no prompt"):
        model.prefill(tiny.observe(model, [NONE], [0]))


def test_absent_images_and_padding_never_enter_the_network(monkeypatch):
    model = tiny.flow()
    seen = {}

    def watch(part, method):
        original = getattr(part, method)

        def counted(first, *rest):
            seen[method] = len(first)
            return original(first, *rest)

        monkeypatch.setattr(part, method, counted)

    watch(model.vision, "forward")
    watch(model.vlm, "embed")
    observation = tiny.observe(model, [ALL, [True, False, False]], [5, 2])
    cache = model.prefill(observation)
    assert seen == {"forward": 4, "embed": 7}
    assert cache.caches[0].length == 3 * 4 + 5  # the longest row, not three cameras + seven


def test_equal_lengths_need_no_mask_and_pi05_none_at_all():
    layout = ([[True, False, True], [False, True, True]], [4, 4])
    for pi05 in (False, True):
        model = tiny.flow(pi05=pi05)
        packing = model.embed_prefix(tiny.observe(model, *layout)).packing
        assert packing.lengths is None
        mask = model.prefill(tiny.observe(model, *layout)).mask
        assert mask is None if pi05 else mask.shape == (1, 5, 2 * 4 + 4 + 5)


def test_sampling_never_copies_the_prefix():
    model = tiny.flow()
    with torch.no_grad():
        cache = model.prefill(tiny.observe(model, [ALL], [5]))
        before = [one.keys.clone() for one in cache.caches]
        pointers = [one.keys.data_ptr() for one in cache.caches]
        length = cache.caches[0].length
        assert cache.caches[0].keys.shape[2] == length + 5
        model.velocity(tiny.chunk(model, 1), torch.ones(1), cache)
    for one, old, pointer in zip(cache.caches, before, pointers):
        assert one.keys.data_ptr() == pointer
        assert torch.equal(one.keys[:, :, :length], old[:, :, :length])
        assert not torch.equal(one.keys[:, :, length:], old[:, :, length:])


@FAMILIES
def test_velocity_is_differentiable_in_the_actions_with_a_ready_cache(pi05):
    """Guided sampling takes the Jacobian through the network, between steps without gradients."""
    model = tiny.flow(pi05=pi05).requires_grad_(False)
    observation = tiny.observe(model, [ALL, [True, False, False]], [5, 3])
    with torch.no_grad():
        cache = model.prefill(observation)
    noise, time = tiny.chunk(model, 2), torch.tensor([0.3, 0.6])
    found, expected = (noise.clone().requires_grad_() for _ in range(2))
    for _ in range(2):
        found.grad = None
        model.velocity(found, time, cache).square().sum().backward()
        with torch.no_grad():
            model.velocity(noise, time, cache)
    plain.velocity(model, observation, expected, time).square().sum().backward()
    assert_close(found.grad, expected.grad, atol=2e-4, rtol=2e-4)


@FAMILIES
def test_condition_of_many_times_equals_one_by_one(pi05):
    model = tiny.flow(pi05=pi05)
    observation, noise = tiny.observe(model, [ALL, ALL], [2, 6]), tiny.chunk(model, 2)
    times = torch.tensor([1.0, 0.6, 0.2])
    with torch.no_grad():
        cache, many = model.prefill(observation), model.condition(times)
        for row, time in enumerate(times):
            expected = model.velocity(noise, time.expand(2), cache)
            close(model.velocity(noise, many.at(row), cache), expected)


@FAMILIES
def test_bfloat16_stays_close_and_keeps_what_must_be_float32(pi05):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, [ALL, [True, False, False]], [2, 6])
    noise = tiny.chunk(model, 2)
    exact = model.act(observation, noise)
    masters = with_dtype(model, "bfloat16")
    served = copy.deepcopy(masters)
    cast_for_inference(served, torch.bfloat16)
    for low in (masters, served):
        found = low.act(observation, noise)
        assert found.dtype == torch.float32
        assert 0 < (found - exact).abs().max() < 0.15
        assert (found - exact).abs().mean() < 0.03
    float32 = {n for n, p in served.named_parameters() if p.dtype == torch.float32}
    expected = {
        name
        for name, _ in served.named_parameters()
        if name.startswith(("vision.patch_embedding", "vision.position_embedding", "suffix"))
        or ("norm" in name and "modulation" not in name)
    }
    assert float32 == expected


def test_construction_needs_no_memory_and_filling_gives_the_same_model():
    model = tiny.flow(pi05=True)
    with torch.device("meta"):
        empty = Pi0(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not list(empty.buffers())
    cast_for_inference(empty, torch.bfloat16)
    empty.load_state_dict(model.state_dict(), assign=True)
    observation, noise = tiny.observe(model, [ALL], [4]), tiny.chunk(model, 1)
    assert torch.equal(empty.act(observation, noise), model.act(observation, noise))


def test_sampling_is_reproducible_and_says_what_is_wrong():
    model = tiny.flow()
    observation = tiny.observe(model, [ALL], [4])
    first = model.act(observation, generator=seeded())
    assert torch.equal(first, model.act(observation, generator=seeded()))
    assert not torch.equal(first, model.act(observation, generator=seeded(1)))
    with pytest.raises(ValueError, match="num_steps"):
        model.act(observation, num_steps=0)
    with pytest.raises(ValueError, match=r"noise has shape \(2, 4, 5\), expected \(1, 4, 5\)"):
        model.act(observation, tiny.chunk(model, 2))
    renamed = dataclasses.replace(
        observation,
        images={"top": observation.images["camera_0"]},
        image_masks={"top": observation.image_masks["camera_0"]},
    )
    with pytest.raises(ValueError, match=r"camera_0.*top"):
        model.prefill(renamed)
    small = {name: image[:, :8] for name, image in observation.images.items()}
    with pytest.raises(ValueError, match="16 × 16 × 3, found 8 × 16 × 3"):
        model.prefill(dataclasses.replace(observation, images=small))


@FAMILIES
def test_candidates_share_a_prefix_and_equal_separate_calls(pi05, monkeypatch):
    model = tiny.flow(pi05=pi05)
    observation = tiny.observe(model, [ALL, [False, True, False]], [2, 7])
    noise = tiny.chunk(model, 2, 3)
    weights = torch.linspace(1, 0, 4).expand(2, -1)
    for guidance in (None, Guidance(tiny.chunk(model, 2, seed=9), weights)):
        separate = [model.act(observation, noise[:, i], guidance=guidance) for i in range(3)]
        calls = []
        tower = model.vision.forward
        with monkeypatch.context() as patch:
            patch.setattr(model.vision, "forward", lambda *a: calls.append(1) or tower(*a))  # noqa: B023
            together = model.act(observation, noise, guidance=guidance)
        assert len(calls) == 1
        assert_close(together, torch.stack(separate, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_path_of_the_integrator_is_returned(num_steps):
    model = tiny.flow()
    observation, noise = tiny.observe(model, [ALL], [4]), tiny.chunk(model, 1)
    with torch.no_grad():
        found = model.act_with(observation, ActOptions(noise, num_steps=num_steps))
    path = found.path
    assert len(path) == num_steps + 1
    assert torch.equal(path[0], noise)
    assert torch.equal(path[-1], found.actions)
    cache = model.prefill(observation)
    for step, (before, after) in enumerate(itertools.pairwise(path)):
        velocity = model.velocity(before, torch.tensor([1 - step / num_steps]), cache)
        close(after, before - velocity.detach() / num_steps)


@pytest.mark.slow
def test_compiled_prefill_and_velocity_equal_eager():
    # In a process of its own: what checks shapes in tests cannot be compiled.
    code = (
        "from tests.models.test_flow import compile_and_compare\n"
        "compile_and_compare(pi05=False)\n"
        "compile_and_compare(pi05=True)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def compile_and_compare(pi05):
    shallow = {"vlm": tiny.gemma(depth=1), "action_expert": tiny.gemma(14, depth=1)}
    model = tiny.flow(pi05=pi05, **shallow)
    observation = tiny.observe(model, [ALL, [True, False, False]], [2, 6])
    noise = tiny.chunk(model, 2)
    expected = model.act(observation, noise, num_steps=4)
    model.prefill = torch.compile(model.prefill, backend="aot_eager")
    model.velocity = torch.compile(model.velocity, backend="aot_eager", fullgraph=True)
    close(model.act(observation, noise, num_steps=4), expected)


def with_dtype(model, dtype):
    changed = Pi0(dataclasses.replace(model.config, dtype=dtype))
    changed.load_state_dict(model.state_dict())
    return changed


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)

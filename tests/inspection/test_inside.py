"""What is shown of an inference is what the model computes: its path, its attention, its tokens."""

import dataclasses

import numpy as np
import pytest
import torch

from piston.inspection.frames import Frames
from piston.inspection.inside import END, START, inside, record_attention, words_of
from piston.inspection.probe import Intervention, Probe
from piston.robots.description import DescribedRobotDataConfig
from piston.tokenizers.fast import FASTTokenizer
from piston.tokenizers.text import BytesTokenizer

from . import untrained
from .untrained import BASE_SLOT, WRIST_SLOT

HORIZON, DIM = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return untrained.record(tmp_path_factory.mktemp("inside") / "data")


@pytest.fixture(scope="module", params=["pi0", "pi05", "text"])
def flow(request, folder):
    policy = untrained.policy(request.param)
    return policy, Frames.open(policy, folder)


@pytest.fixture
def hooked():
    """Calls a function with the inputs and the output of a module until the test ends."""
    handles = []

    def hook(module, function):
        call = lambda _, inputs, output: function(inputs, output)  # noqa: E731
        handles.append(module.register_forward_hook(call))

    yield hook
    for handle in handles:
        handle.remove()


def test_the_weights_times_the_values_are_what_each_layer_attends_to(flow, hooked):
    policy, frames = flow
    layers = policy.model.action_expert.layers
    weights, values, mixed = [], [], []
    for layer in layers:
        hooked(layer.attention.output, lambda inputs, _: mixed.append(inputs[0]))
        hooked(layer, lambda _, output: values.append(output[1].read()[1].clone()))
    # One sample has a camera less and another prompt, so that masks matter.
    probe, frame = Probe(policy, [0]), frames[0, 3]
    shorter = Intervention(prompt="o", off=(BASE_SLOT,))
    versions = [probe.prepare(frame, one) for one in (Intervention(), shorter)]
    observation = policy.runner.observe(versions)
    noise = torch.randn(2, HORIZON, DIM + 1, generator=torch.Generator().manual_seed(0))
    with record_attention(layers, lambda layer, found: weights.append((layer, found))):
        recorded = policy.model.act(observation, noise, num_steps=2)
    assert [layer for layer, _ in weights] == [0, 1, 0, 1]
    for (_, attention), value, output in zip(weights, values, mixed, strict=True):
        group = attention.shape[1] // value.shape[1]
        expected = attention @ value.repeat_interleave(group, 1)
        expected = expected.transpose(1, 2).flatten(2)
        torch.testing.assert_close(expected, output, rtol=1e-4, atol=1e-3)
    assert torch.equal(policy.model.act(observation, noise, num_steps=2), recorded)
    assert len(weights) == 4, "nothing is recorded afterwards"


def test_attention_is_shared_out_among_all_that_there_is(flow):
    policy, frames = flow
    probe, frame = Probe(policy, [0]), frames[0, 3]
    found = inside(probe, frame).attention
    assert found.images.keys() == {BASE_SLOT, WRIST_SLOT}
    assert found.images[BASE_SLOT].shape == (2, 2, 2)
    sentence = ("open", "the", "drawer")
    assert found.words[:4] in ((START, *sentence), (START, "Task:", *sentence[:2]))
    assert (found.of_state is None) == policy.model.config.pi05
    state = 0 if found.of_state is None else found.of_state
    cameras = sum(one.sum((1, 2)) for one in found.images.values())
    total = cameras + found.of_words.sum(1) + state + found.of_actions
    np.testing.assert_allclose(total, 1, rtol=1e-5)
    written = policy.infer(frame.observation).get("subtask", "")
    assert " ".join(found.words).count(" ".join(written.split())) == 1 or not written
    off = inside(probe, frame, Intervention(off=(BASE_SLOT,))).attention
    assert off.images.keys() == {WRIST_SLOT}


def test_a_patch_that_draws_all_attention_is_found_where_it_is(flow, hooked):
    policy, frames = flow
    place = 4 + 2  # the third patch of the second camera

    def only_there(_, keys):
        changed = torch.zeros_like(keys)
        changed[:, place : place + 1] = 9  # not in a token of the text, which follows by itself
        return changed

    hooked(policy.model.vlm.layers[0].attention.key, only_there)
    attention = policy.model.action_expert.layers[0].attention
    hooked(attention.key, lambda _, keys: torch.zeros_like(keys))
    hooked(attention.query, lambda _, queries: torch.full_like(queries, 9))
    found = inside(Probe(policy, [0]), frames[0, 3]).attention
    assert found.images[WRIST_SLOT][0].argmax() == 2
    assert found.images[WRIST_SLOT][0].max() > 0.5


def test_the_path_leads_from_the_noise_to_the_policys_answer(flow):
    policy, frames = flow
    probe, frame = Probe(policy, [5, 6]), frames[1, 2]
    found = inside(probe, frame)
    assert found.path.shape == (policy.num_steps + 1, HORIZON, DIM)
    np.testing.assert_array_equal(found.path[0], probe.noise[0][:, :DIM])
    answered = policy.infer(frame.observation, noise=probe.noise[0])["actions"]
    state = probe.prepare(frame, Intervention())
    end = policy.to_robot(state, np.pad(found.path[-1], ((0, 0), (0, 1))))["actions"]
    np.testing.assert_allclose(end, answered, atol=1e-5)
    # In the model's units, what was recorded becomes itself in the robot's.
    back = policy.to_robot(state, np.pad(found.recorded, ((0, 0), (0, 1))))["actions"]
    np.testing.assert_allclose(back, frame.recorded, atol=1e-5)


@pytest.fixture
def fast(tmp_path):
    chunks = np.random.default_rng(0).normal(size=(50, HORIZON, DIM))
    FASTTokenizer.fit(chunks, vocab_size=256).save(tmp_path)
    settings = {"action_dim": DIM, "vocab_size": 700, "fast_tokenizer": str(tmp_path)}
    model = dataclasses.replace(untrained.MODELS["fast"], **settings)
    data = DescribedRobotDataConfig(description=untrained.ROBOT, prompt_from_task=True)
    pipeline = dataclasses.replace(data.create("assets", model), norm_stats={})
    return untrained.with_random_weights(model, pipeline)


def test_the_written_tokens_have_the_probabilities_they_were_chosen_by(fast, folder):
    policy, frame = fast, Frames.open(fast, folder)[0, 2]
    probe = Probe(policy)
    found = inside(probe, frame)
    assert found.path is None
    assert found.attention is None
    observation = fast.runner.observe([probe.prepare(frame, Intervention())])
    tokens = policy.model.act(observation)[0].tolist()
    prompt = policy.data.model_transforms.outputs[0].prompt
    assert [one.text for one in found.written] == [prompt.describe(token) for token in tokens]
    for one in found.written:
        # The likeliest is taken, and the others follow in order.
        assert one.likely[0] == (one.text, one.probability)
        probabilities = [probability for _, probability in one.likely]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 1 + 1e-6


def test_words_have_their_tokens():
    text, ids = BytesTokenizer(), BytesTokenizer().encode
    words, places = words_of(text, [*ids("öffne  die Tür", bos=True), *ids("\n")])
    assert words == (START, "öffne", "die", "Tür", END)
    # ö has two bytes; the spaces belong to the word before them.
    assert places == [0, *[1] * 8, *[2] * 4, *[3] * 4, 4]

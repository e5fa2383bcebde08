"""Which bucket an observation is computed in, and what is computed without graphs."""

import logging

import numpy as np
import pytest
import torch
from tests.models import tiny
from torch.testing import assert_close

from piston.inference import compiled
from piston.inference.compiled import Bucket, Buckets, GraphEngine, Graphs, camera_counts
from piston.inference.loading import load_policies, random_policy
from piston.inference.packing import quantize_for_inference
from piston.inference.policy import Policy
from piston.logs import forget_warnings
from piston.models.integrator import Committed, Guidance
from piston.models.model import ActOptions
from piston.models.static import StaticDenoise, StaticPrefill
from piston.robots.aloha import make_aloha_example

STEPS = 2


class Recorder:
    """Graphs that are not compiled and write down the shapes that they were called with."""

    def __init__(self, model):
        self.prefill_part, self.denoise_part = StaticPrefill(model), StaticDenoise(model, STEPS)
        self.shapes = []

    def prefill(self, images, prompt, lengths):
        self.shapes.append(Bucket(*images.shape[:2], prompt.shape[1]))
        return self.prefill_part(images, prompt, lengths)

    def denoise(self, *inputs):
        return self.denoise_part(*inputs)


@pytest.fixture
def model():
    return tiny.flow(max_token_len=40)


@pytest.fixture
def graphs(model):
    return Recorder(model)


@pytest.fixture
def engine(model, graphs):
    buckets = Buckets.of(model.config, (1, 3), max_batch=5)
    pair = Graphs(graphs.prefill, graphs.denoise)
    return GraphEngine(model, pair, buckets, STEPS, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _warnings():
    forget_warnings()


def act(engine, observation, noise, **options):
    return engine.act_with(observation, ActOptions(noise, num_steps=STEPS, **options)).actions


def test_buckets_reach_the_largest_sizes(model):
    buckets = Buckets.of(model.config, {3, 1}, max_batch=6)
    assert buckets == Buckets((1, 2, 4, 6), (1, 3), (16, 32, 40))
    assert buckets.smallest(3, 1, 17) == Bucket(4, 1, 32)
    assert buckets.smallest(1, 3, 0) == Bucket(1, 3, 16)
    assert len(list(buckets)) == 4 * 2 * 3
    with pytest.raises(ValueError, match="max_batch must be at least 1, is 0"):
        Buckets.of(model.config, {1}, max_batch=0)


def test_every_bucket_is_run_before_the_first_request(engine, graphs, caplog):
    caplog.set_level(logging.INFO)
    engine.warm_up()
    assert graphs.shapes == list(engine.buckets)
    # 24 of each part, but one camera and 40 words are as many tokens as three cameras and 32 words.
    assert "Compiled 44 graphs" in caplog.text
    assert "batches of 1, 2, 4, 5, 1, 3 cameras, prompts of 16, 32, 40 tokens" in caplog.text


def test_samples_are_divided_by_cameras_and_padded(engine, graphs, model):
    engine.warm_up()
    graphs.shapes.clear()
    one, all_, other = (True, False, False), (True, True, True), (False, False, True)
    present = [one, all_, one, other, one, *[all_] * 6]
    words = [3, 20, 0, 40, 16, 1, 2, 3, 4, 5, 33]
    observation = tiny.observe(model, present, words)
    noise = tiny.chunk(model, len(words))
    assert_close(
        act(engine, observation, noise),
        model.act(observation, noise, num_steps=STEPS),
        atol=2e-6,
        rtol=1e-5,
    )
    # By camera sets: the third camera; the first; all three, of which five fit into one batch.
    expected = [Bucket(1, 1, 40), Bucket(4, 1, 16), Bucket(5, 3, 32), Bucket(2, 3, 40)]
    assert graphs.shapes == expected


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("guided real-time chunking", "guidance"),
        ("several candidates", "candidates"),
        ("another number of steps than 2", "steps"),
        ("an observation with 2 cameras", "cameras"),
        ("a prompt with gaps", "gaps"),
        ("images that are not bytes", "floats"),
        ("actions without given noise", "noise"),
    ],
)
def test_what_graphs_cannot_do_the_model_does(engine, graphs, model, reason, change, caplog):
    observation = tiny.observe(model, [[True] * 3], [4])
    noise, options = tiny.chunk(model, 1), {}
    if change == "guidance":
        options["guidance"] = Guidance(torch.zeros_like(noise), torch.ones(1, 4), "identity")
    elif change == "candidates":
        noise = tiny.chunk(model, 1, 3)
    elif change == "cameras":
        observation = tiny.observe(model, [[True, False, True]], [4])
    elif change == "gaps":
        observation.tokenized_prompt_mask[0, 1] = False
    elif change == "floats":
        for name, image in observation.images.items():
            observation.images[name] = image / 127.5 - 1
    engine.warm_up()
    graphs.shapes.clear()
    options["num_steps"] = 3 if change == "steps" else STEPS
    noise = None if change == "noise" else noise
    for _ in range(2):
        asked = ActOptions(noise, generator=torch.Generator().manual_seed(0), **options)
        found = engine.act_with(observation, asked).actions
        asked = ActOptions(noise, generator=torch.Generator().manual_seed(0), **options)
        assert torch.equal(found, model.act_with(observation, asked).actions)
    assert graphs.shapes == []
    assert caplog.text.count(f"Not compiled, and therefore slower: {reason}") == 1


def test_a_call_that_would_compile_again_runs_without_graphs(engine, model, monkeypatch, caplog):
    engine.warm_up()

    def fail(*_):
        raise RuntimeError("Detected recompile when torch.compile stance is 'fail_on_recompile'.")

    monkeypatch.setattr(engine, "_graphs", Graphs(fail, fail))
    observation, noise = tiny.observe(model, [[True] * 3], [4]), tiny.chunk(model, 1)
    found = act(engine, observation, noise)
    assert torch.equal(found, model.act(observation, noise, num_steps=STEPS))
    assert "a graph that does not fit any more" in caplog.text


def test_committed_actions_and_the_path_are_those_of_the_model():
    """Rows with and without committed actions, in batches with padding."""
    model = tiny.flow(pi05=True, max_delay=3, max_token_len=20)
    recorder = Recorder(model)
    buckets = Buckets.of(model.config, (3,), max_batch=4)
    graphs = Graphs(recorder.prefill, recorder.denoise)
    engine = GraphEngine(model, graphs, buckets, STEPS, device=torch.device("cpu"))
    observation = tiny.observe(model, [[True] * 3] * 3, [3, 20, 9])
    noise, previous = tiny.chunk(model, 3), tiny.chunk(model, 3, seed=8)
    steps = torch.arange(4) < torch.tensor([[2], [0], [3]])
    for committed in (Committed(previous, steps), None):
        options = ActOptions(noise, num_steps=STEPS, committed=committed)
        with torch.no_grad():
            found, expected = (
                engine.act_with(observation, options),
                model.act_with(observation, options),
            )
        assert_close(found.path, expected.path, atol=2e-6, rtol=1e-5)
        assert torch.equal(found.actions, found.path[-1])
    assert len(recorder.shapes) == 2 + len(list(buckets))


def test_how_many_cameras_robots_send(model):
    aloha, ur5 = (random_policy(p).data.robot_metadata for p in ("pi0_aloha_sim", "pi0_ur5"))
    assert camera_counts([aloha], model.config) == {1, 2, 3}
    assert camera_counts([ur5], model.config) == {2}
    assert camera_counts([{}], tiny.flow(num_cameras=2).config) == {1, 2}
    assert camera_counts([ur5, ur5], model.config) == {2}


def test_models_without_graphs_are_refused():
    with pytest.raises(ValueError, match="π0-FAST writes actions token by token"):
        compiled.compile_graphs(tiny.fast(), 2)
    with pytest.raises(ValueError, match="trained to write text"):
        compiled.compile_graphs(tiny.flow(pi05=True, targets=("text",)), 2)
    model = tiny.flow()
    quantize_for_inference(model)
    with pytest.raises(ValueError, match="held in int8"):
        compiled.compile_graphs(model, 2)


def test_a_policy_answers_through_its_engine():
    torch.manual_seed(0)
    plain = random_policy("pi0_aloha_sim", num_steps=STEPS)
    recorder = Recorder(plain.model)
    buckets = Buckets.of(plain.model.config, (1, 2, 3), max_batch=2)
    graphs = Graphs(recorder.prefill, recorder.denoise)
    engine = GraphEngine(plain.model, graphs, buckets, STEPS, device=plain.device)
    policy = Policy(plain.model, plain.data, num_steps=STEPS, engine=engine)
    assert policy.warm_up() > 0
    example = make_aloha_example()
    few = {**example, "images": {"cam_high": example["images"]["cam_high"]}}
    found = policy.infer_batch([{**one, "seed": 1} for one in (example, few)])
    expected = plain.infer_batch([{**one, "seed": 1} for one in (example, few)])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours["actions"], theirs["actions"], atol=1e-5)
    with pytest.raises(ValueError, match="num_steps is 10, but the policy is compiled for 2"):
        Policy(plain.model, plain.data, engine=engine, num_steps=10)
    assert Policy(plain.model, plain.data, engine=engine).num_steps == STEPS


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="max_batch is for compiled policies"):
        load_policies("anywhere", max_batch=4)

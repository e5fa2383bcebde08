"""The sample on the page is what training sees, and the chunk is what the policy answers."""

import numpy as np
import pytest

from piston.data.pipeline import open_training_data
from piston.inference import load_policy
from piston.report.dataset import open_sets
from piston.report.prediction import predict
from piston.report.training import read_run
from piston.report.transforms import choose_sample

from . import cases


@pytest.fixture(scope="module")
def looked_at(run):
    found = read_run(run)
    sample = choose_sample(found, open_sets(found))
    policy = load_policy(found.checkpoint)
    return sample, policy, predict(policy, sample)


def test_the_sample_was_held_out_and_is_what_the_model_is_given(looked_at, run):
    sample, _, _ = looked_at
    assert sample.held_out
    assert sample.at.frame == cases.NUM_FRAMES // 4
    config = read_run(run).config
    samples = open_training_data(config.data_config().with_norm_stats(), config.model)
    seen = samples[sample.at.episode * cases.NUM_FRAMES + sample.at.frame]
    found = sample.seen_by_model
    for key in ("state", "actions", "tokenized_prompt", "tokenized_prompt_mask", "action_is_pad"):
        np.testing.assert_array_equal(found[key], seen[key], err_msg=key)
    np.testing.assert_array_equal(found["image"]["base_0_rgb"], seen["image"]["base_0_rgb"])


def test_the_recorded_chunk_is_in_the_robots_own_space(looked_at):
    sample, _, _ = looked_at
    steps = np.arange(sample.at.frame, sample.at.frame + (cases.HORIZON - 1) * cases.STRIDE + 1)
    for offset, step in enumerate(steps):
        expected = cases._frame(sample.at.episode, step)["action"]
        np.testing.assert_allclose(sample.at.recorded[offset], expected, rtol=1e-6)
    assert sample.at.is_real.all()
    assert sample.names == tuple(cases.NAMES)


def test_the_chain_back_ends_at_what_the_policy_answers(looked_at):
    sample, policy, prediction = looked_at
    assert prediction.chunks.shape == (4, *sample.at.recorded.shape)
    assert len(prediction.denoised) == policy.num_steps + 1
    noise = prediction.denoised[0]
    answered = policy.infer({**sample.at.observation, "noise": noise})["actions"]
    chain_end = prediction.back[-1].data["actions"]
    # The draws were one batch, this is one alone.
    np.testing.assert_allclose(prediction.chunks[0], answered, atol=2e-2)
    np.testing.assert_allclose(chain_end, answered, atol=2e-2)
    assert prediction.num_timed > 0
    assert prediction.latency_ms["p50"] > 0

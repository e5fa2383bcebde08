"""The sample on the page is what training sees, and the chunk is what the policy answers."""

import numpy as np
import pytest
import torch

from piston.data.pipeline import open_training_data
from piston.inference import load_policy
from piston.models.flow import Pi0
from piston.observation import Observation
from piston.report.denoising import denoise
from piston.report.prediction import _batch_of_one, predict
from piston.report.run import read_run
from piston.report.sample import choose_sample, read_pipeline

from . import cases


@pytest.fixture(scope="module")
def looked_at(run):
    found = read_run(run)
    pipeline = read_pipeline(found.config, found.checkpoint)
    sample = choose_sample(found.config, pipeline)
    policy = load_policy(found.checkpoint)
    return sample, policy, predict(policy, pipeline, sample)


def test_the_sample_was_held_out_and_is_what_the_model_is_given(looked_at, run):
    sample, _, _ = looked_at
    assert sample.held_out
    assert sample.frame == cases.NUM_FRAMES // 4
    config = read_run(run).config
    samples = open_training_data(config.data_config().with_norm_stats(), config.model)
    seen = samples[sample.episode * cases.NUM_FRAMES + sample.frame]
    found = sample.seen_by_model
    for key in ("state", "actions", "tokenized_prompt", "tokenized_prompt_mask", "action_is_pad"):
        np.testing.assert_array_equal(found[key], seen[key], err_msg=key)
    np.testing.assert_array_equal(found["image"]["base_0_rgb"], seen["image"]["base_0_rgb"])


def test_the_recorded_chunk_is_in_the_robots_own_space(looked_at):
    sample, _, _ = looked_at
    steps = np.arange(sample.frame, sample.frame + (cases.HORIZON - 1) * cases.STRIDE + 1)
    for offset, step in enumerate(steps):
        expected = cases._frame(sample.episode, step)["action"]
        np.testing.assert_allclose(sample.recorded[offset], expected, rtol=1e-6)
    assert sample.is_real.all()
    assert sample.names == tuple(cases.NAMES)


def test_the_chain_back_ends_at_what_the_policy_answers(looked_at):
    sample, policy, prediction = looked_at
    assert prediction.chunks.shape == (4, *sample.recorded.shape)
    noise = prediction.denoising.passed[0]
    answered = policy.infer({**sample.observation, "noise": noise})["actions"]
    chain_end = prediction.denoising.trace[-1].data["actions"]
    # The draws were one batch, this is one alone.
    np.testing.assert_allclose(prediction.chunks[0], answered, atol=2e-2)
    np.testing.assert_allclose(chain_end, answered, atol=2e-2)
    assert prediction.infer_ms


@pytest.mark.parametrize("num_steps", [1, 4])
def test_denoising_step_by_step_is_sampling(looked_at, num_steps):
    sample, policy, _ = looked_at
    model = policy.model
    assert isinstance(model, Pi0)
    observation = Observation.from_dict(_batch_of_one(sample.seen_by_model))
    shape = (model.config.action_horizon, model.config.action_dim)
    noise = np.random.default_rng(1).standard_normal(shape, np.float32)
    passed = denoise(model, observation, noise, num_steps)
    assert passed.shape == (num_steps + 1, *shape)
    np.testing.assert_array_equal(passed[0], noise)
    sampled = model.sample_actions(observation, torch.from_numpy(noise)[None], num_steps)[0]
    np.testing.assert_allclose(passed[-1], sampled.numpy(), atol=1e-5)


def test_denoising_needs_a_step(looked_at):
    sample, policy, _ = looked_at
    observation = Observation.from_dict(_batch_of_one(sample.seen_by_model))
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        denoise(policy.model, observation, np.zeros((1, 1), np.float32), 0)

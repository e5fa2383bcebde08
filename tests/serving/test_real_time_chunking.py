"""Real-time chunking from end to end: a trained flow model, the real server, client and broker.

The toy system has one joint, and each chunk moves it to another place. The model was shown all
places around the joint, and chooses anew for each chunk. A chunk comes DELAY steps after it was
asked for and begins where the joint was then: the joint jumps, unless the chunk continues what was
executed meanwhile.
"""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from piston.inference.policy import Policy
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.models.flow import Pi0
from piston.observation import Observation
from piston.robots.simple import LeRobotUR5DataConfig
from piston.serving import running_server
from piston.transforms import compose
from piston.transforms.normalize import NormStats
from piston_client import AsyncChunkBroker, Client, RealTimeBroker

HORIZON, EXECUTE, DELAY = 12, 5, 4
# The way from where the joint is to a place at distance 1.
WAY = 1 - np.exp(-np.arange(1, HORIZON + 1) / 2)
_SIZE = GemmaSize(width=32, depth=1, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)
CONFIG = Pi0Config(
    pi05=True,
    action_dim=8,
    action_horizon=HORIZON,
    max_token_len=64,
    dtype="float32",
    vision=VisionSize(width=8, depth=1, mlp_dim=8, num_heads=1, patch=32),
    vlm=_SIZE,
    action_expert=_SIZE,
    vocab_size=300,
    image_size=32,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    tokenizer="bytes",
)


def _observe(joint: float) -> dict:
    black = np.zeros((32, 32, 3), np.uint8)
    joints = np.array([joint, 0, 0, 0, 0, 0], np.float32)
    gripper = np.zeros(1, np.float32)
    images = {"base_rgb": black, "wrist_rgb": black}
    return {**images, "joints": joints, "gripper": gripper, "prompt": "go"}


def _batch(seen: dict, count: int) -> dict:
    return {
        key: _batch(part, count) if isinstance(part, dict) else np.stack([part] * count)
        for key, part in seen.items()
    }


def _train(model: Pi0, to_model, shapes_checked, num_steps: int = 300, batch_size: int = 8) -> None:
    """One observation, and all places to go to from there."""
    random = np.random.default_rng(0)
    observation = Observation.from_dict(_batch(to_model(_observe(0.0)), batch_size))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_steps)
    for step in range(num_steps):
        actions = np.zeros((batch_size, HORIZON, 7), np.float32)
        actions[..., 0] = random.standard_normal((batch_size, 1)) * WAY
        ways = [to_model({**_observe(0.0), "actions": way})["actions"] for way in actions]
        optimizer.zero_grad()
        targets = torch.from_numpy(np.stack(ways).astype(np.float32))
        draws = model.draw(batch_size, num_draws=4)
        with shapes_checked(step == 0):  # those of other steps are the same
            losses = model.training_losses(observation, targets, draws)
        losses["velocity"].mean().backward()
        optimizer.step()
        schedule.step()


@pytest.fixture(scope="module")
def policy(tmp_path_factory, shapes_checked):
    return _make_policy(CONFIG, tmp_path_factory.mktemp("assets"), shapes_checked)


@pytest.fixture(scope="module")
def trained_policy(tmp_path_factory, shapes_checked):
    """As the other, but with delays of up to DELAY steps in training."""
    config = dataclasses.replace(CONFIG, max_delay=DELAY)
    return _make_policy(config, tmp_path_factory.mktemp("assets"), shapes_checked)


def _make_policy(config, folder, shapes_checked):
    torch.manual_seed(0)
    # UR5's joints are relative to the state, so that an old chunk has to be re-based.
    data = LeRobotUR5DataConfig(repo_id="toy").create(folder, config)
    one = np.ones(7)
    actions = NormStats(0 * one, one, -one, one)
    # So wide that every state looks the same to the model, which saw only one.
    state = NormStats(0 * one, one, -900 * one, 1000 * one)
    data = dataclasses.replace(data, norm_stats={"state": state, "actions": actions})
    model = Pi0(config)
    _train(model, compose(data.input_transforms(training=False)), shapes_checked)
    return Policy(model, data, seed=0)


class Late:
    """A policy whose answers come exactly DELAY control steps after the question."""

    def __init__(self, policy) -> None:
        self._policy, self.metadata = policy, policy.metadata
        self._time = threading.Condition()
        self._now = 0
        self.asked: list[int] = []

    def infer(self, observation):
        with self._time:
            self.asked.append(self._now)
            # Nothing moves before the first answer.
            due = self._now + (DELAY if len(self.asked) > 1 else 0)
            self._time.notify_all()
        result = self._policy.infer(observation)
        with self._time:
            assert self._time.wait_for(lambda: self._now >= due, timeout=20)
        return result

    def step(self, broker, observation) -> dict:
        """One control step: an answer that is due has come, a question has left."""
        request = broker._request
        if request is not None and self._now >= self.asked[-1] + DELAY:
            request.answer.exception(timeout=20)
        num_asked = len(self.asked)
        result = broker.infer(observation)
        with self._time:
            if broker._request is not None and broker._request is not request:
                assert self._time.wait_for(lambda: len(self.asked) > num_asked, timeout=20)
            self._now += 1
            self._time.notify_all()
        return result


def _drive(make_broker, url: str, num_steps: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """How far the joint went in each step: those onto a new chunk, and those within one."""
    joint, joints, chunk_steps = 0.0, [], []
    with Client(url, timeout=20) as client:
        late = Late(client)
        broker = make_broker(late)
        for _ in range(num_steps):
            result = late.step(broker, _observe(joint))
            joint = float(result["actions"][0])
            joints.append(joint)
            chunk_steps.append(result["chunk_step"])
    assert broker.num_held == 0
    distance = np.abs(np.diff(joints))
    is_seam = np.diff(chunk_steps) != 1
    return distance[is_seam], distance[~is_seam]


def test_a_smaller_jump_where_chunks_join(policy):
    with running_server(policy, warm_up=policy.warm_up) as server:
        plain, within_plain = _drive(lambda one: AsyncChunkBroker(one, EXECUTE), server.url)
        guided, within_guided = _drive(lambda one: RealTimeBroker(one, EXECUTE), server.url)
    # A new chunk is begun at steps 9, 14, 19 …
    assert len(plain) == len(guided) == 29
    # Measured: 0.60 and 0.13 in the mean, 2.24 and 0.31 at worst; 0.1 within chunks.
    assert plain.mean() > 0.4
    assert guided.mean() < 0.4 * plain.mean()
    assert guided.max() < 0.4 * plain.max()
    # Guided chunks still are what the model would do.
    assert within_guided.mean() == pytest.approx(within_plain.mean(), abs=0.1)


def test_a_trained_policy_joins_its_chunks(policy, trained_policy):
    """The broker learns from the server that the policy is trained; nothing is guided."""
    with running_server(policy) as server:
        plain, within_plain = _drive(lambda one: AsyncChunkBroker(one, EXECUTE), server.url)
    brokers = []

    def make_broker(late):
        brokers.append(RealTimeBroker(late, EXECUTE, initial_delay=DELAY))
        return brokers[-1]

    with running_server(trained_policy) as server:
        trained, within = _drive(make_broker, server.url)
    assert brokers[0]._kind(8) == ("trained", DELAY)
    assert brokers[0].delay == DELAY
    # Measured: 0.60 and 0.12 in the mean, 2.24 and 0.27 at worst; 0.1 within chunks.
    assert trained.mean() < 0.3 * plain.mean()
    assert trained.max() < 0.3 * plain.max()
    assert within.mean() == pytest.approx(within_plain.mean(), abs=0.1)


def test_delay_zero_and_nothing_committed_equals_plain_sampling(policy):
    """The same noise, and an old chunk of which no step is to be kept; through the server."""
    request = {**_observe(0.5), "seed": 7}
    rtc = {"previous_chunk": np.full((1, 7), 3.0), "delay": 0, "execute_horizon": HORIZON}
    expected = policy.infer(request)["actions"]
    with running_server(policy) as server, Client(server.url) as client:
        plain, guided = client.infer(request), client.infer({**request, "rtc": rtc})
    assert np.abs(plain["actions"] - expected).max() <= 1e-5
    assert np.abs(guided["actions"] - expected).max() <= 1e-5

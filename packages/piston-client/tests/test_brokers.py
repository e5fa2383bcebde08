"""Which action at which step: chunk c, step i of a scripted policy is the action 100 c + i."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piston_client import ActionChunkBroker, TemporalEnsemble


def actions(broker, num_steps):
    return [float(broker.infer({"n": n})["actions"][0]) for n in range(num_steps)]


def test_executes_k_of_a_chunk_then_asks_again(make_policy):
    policy = make_policy(horizon=8)
    broker = ActionChunkBroker(policy, 3)
    assert actions(broker, 7) == [0, 1, 2, 100, 101, 102, 200]
    # Asked at steps 0, 3 and 6, with the observation of that very step.
    assert [observation["n"] for observation in policy.observations] == [0, 3, 6]
    # A request says how many steps of the chunk before it are executed.
    assert [observation["executed_steps"] for observation in policy.observations] == [0, 3, 3]


def test_executes_the_whole_chunk_by_default(make_policy):
    broker = ActionChunkBroker(make_policy(horizon=3))
    assert actions(broker, 5) == [0, 1, 2, 100, 101]


def test_reset_asks_anew_and_resets_the_policy(make_policy):
    policy = make_policy()
    broker = ActionChunkBroker(policy, 3)
    actions(broker, 2)
    broker.reset()
    assert actions(broker, 2) == [100, 101]
    assert policy.num_resets == 1


def test_results_carry_what_the_policy_said_and_the_step(make_policy):
    broker = ActionChunkBroker(make_policy(), 3)
    first, second = broker.infer({}), broker.infer({})
    assert (first["number"], first["chunk_step"], second["chunk_step"]) == (0, 0, 1)
    assert first["actions"].shape == (1,)
    # Changing an action does not change the chunk.
    first["actions"][0] = 999
    broker.reset()
    assert broker.infer({})["actions"][0] == 100


def test_an_error_leaves_the_broker_able_to_ask_again(make_policy):
    policy = make_policy()
    broker = ActionChunkBroker(policy, 2)
    actions(broker, 2)
    policy.error = ConnectionError("away")
    with pytest.raises(ConnectionError):
        broker.infer({})
    policy.error = None
    assert actions(broker, 2) == [200, 201]


class Returns:
    """No reset: anything with `infer` will do."""

    def __init__(self, actions):
        self.result = {"actions": actions}

    def infer(self, observation):  # noqa: ARG002
        return self.result


@pytest.mark.parametrize("make", [ActionChunkBroker, TemporalEnsemble])
@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (np.zeros(3), r"\(3,\).*\(horizon, dim\)"),
        (np.zeros((0, 3)), "horizon, dim"),
        (np.zeros((1, 4, 3)), "horizon, dim"),
        (np.array([[0.0, np.nan]]), "finite"),
        (np.array([[np.inf]]), "finite"),
    ],
)
def test_what_must_not_reach_a_robot(make, chunk, says):
    with pytest.raises(ValueError, match=says):
        make(Returns(chunk)).infer({})


def test_settings_that_make_no_sense():
    with pytest.raises(ValueError, match="1 or more"):
        ActionChunkBroker(Returns(np.zeros((2, 1))), 0)
    with pytest.raises(ValueError, match="chunks have 2 steps"):
        ActionChunkBroker(Returns(np.zeros((2, 1))), 3).infer({})
    with pytest.raises(ValueError, match="1 or more"):
        TemporalEnsemble(Returns(np.zeros((2, 1))), ask_every=0)
    misnamed = Returns(np.zeros((2, 1)))
    misnamed.result = {"action": 1}
    with pytest.raises(ValueError, match="no 'actions'"):
        ActionChunkBroker(misnamed).infer({})
    broker = ActionChunkBroker(Returns(np.zeros((2, 1))))
    broker.infer({})
    broker.reset()


class RandomChunks:
    def __init__(self, horizon, dim, seed):
        self.random = np.random.default_rng(seed)
        self.shape = (horizon, dim)
        self.chunks = []

    def infer(self, observation):  # noqa: ARG002
        self.chunks.append(self.random.normal(size=self.shape).astype(np.float32))
        return {"actions": self.chunks[-1]}


@given(
    horizon=st.integers(1, 6),
    ask_every=st.integers(1, 3),
    decay=st.sampled_from([0.01, 0.0, 0.7, -0.5]),
    num_steps=st.integers(1, 15),
)
def test_ensembling_is_acts_formula(horizon, ask_every, decay, num_steps):
    ask_every = min(ask_every, horizon)
    policy = RandomChunks(horizon, 2, seed=0)
    broker = TemporalEnsemble(policy, decay, ask_every)
    found = [broker.infer({})["actions"] for _ in range(num_steps)]
    # ACT's table: rows are chunks, columns are steps; a column's filled rows are averaged.
    table = np.full((len(policy.chunks), num_steps + horizon, 2), np.nan)
    for row, chunk in enumerate(policy.chunks):
        table[row, row * ask_every : row * ask_every + horizon] = chunk
    for step in range(num_steps):
        column = table[:, step]
        said = column[~np.isnan(column).any(axis=1)]
        weights = np.exp(-decay * np.arange(len(said)))
        expected = (said * (weights / weights.sum())[:, np.newaxis]).sum(axis=0)
        np.testing.assert_allclose(found[step], expected, rtol=1e-5, atol=1e-6)
        assert found[step].dtype == np.float32


def test_ensembling_begins_anew_after_reset(make_policy):
    policy = make_policy(horizon=4)
    broker = TemporalEnsemble(policy, decay=0.0)
    assert actions(broker, 2) == [0, (1 + 100) / 2]
    broker.reset()
    assert actions(broker, 1) == [200]
    assert policy.num_resets == 1


def test_ensembling_chunks_that_are_too_short(make_policy):
    broker = TemporalEnsemble(make_policy(horizon=2), ask_every=3)
    assert actions(broker, 2) == [0, 1]
    with pytest.raises(ValueError, match="ask_every"):
        broker.infer({})

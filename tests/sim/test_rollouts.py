"""Rollouts: what is asked, what is executed, and that episodes do not disturb each other."""

import json
import time

import numpy as np
import pytest
import torch

from piston.cli import main
from piston.inference.loading import random_policy
from piston.inspection import Frames
from piston.progress import ProgressBar
from piston.robots import RobotInputs
from piston.serving import ServerConfig, running_server
from piston.sim import make_environment
from piston.sim.aloha_experts import plan_transfer
from piston.sim.environment import RECORDING_SEEDS
from piston.sim.rollouts import evaluate
from piston.sim.scores import read_evaluation

TASK = "aloha_transfer_cube"
LENGTH = 80
# How rollouts number the draws of noise: seed and step in one.
NOISE_SEEDS = 1_000_003


class Expert:
    """Answers with the expert's plan for the seed and step of each observation."""

    def __init__(self, seeds):
        self.asked = []
        self.plans = {}
        for seed in seeds:
            environment = make_environment(TASK)
            environment.reset(seed)
            plan = plan_transfer(environment.initial_state()["objects"]).actions
            still = np.repeat(plan[-1:], 300 + LENGTH - len(plan), axis=0)
            self.plans[seed] = np.concatenate([plan, still])

    def __call__(self, observations):
        places = [divmod(observation["seed"], NOISE_SEEDS) for observation in observations]
        self.asked.append(places)
        return [{"actions": self.plans[seed][step : step + LENGTH]} for seed, step in places]


def test_a_policy_that_knows_the_way_succeeds_alone_and_among_others():
    seeds = [4, 0, 7]
    together, alone = Expert(seeds), Expert(seeds)
    found = evaluate(TASK, together, seeds, execute_horizon=50, policy_name="expert")
    again = evaluate(
        TASK, alone, seeds, execute_horizon=50, policy_name="expert", num_environments=1
    )
    assert found.outcomes == again.outcomes
    assert [outcome.seed for outcome in found.outcomes] == seeds
    assert found.success.successes == found.held.successes == 3
    # Three in one request, or one after the other; every 50 steps of 300.
    assert [len(places) for places in together.asked] == [3] * 6
    assert [len(places) for places in alone.asked] == [1] * 18
    assert sorted({step for places in together.asked for _, step in places}) == [*range(0, 300, 50)]

    trace = found.trace
    assert trace.seed == 4
    assert trace.starts == (0, 50, 100, 150, 200, 250)
    np.testing.assert_array_equal(trace.executed, together.plans[4][:300])
    np.testing.assert_array_equal(trace.chunks[1], together.plans[4][50 : 50 + LENGTH])


class Delayed:
    """Evaluates the expert with answers that come 7 steps late, and keeps its requests."""

    def __init__(self, execution, **options):
        expert, self.requests = Expert([4]), []

        def infer(observations):
            self.requests += observations
            return expert(observations)

        about = {"rtc": {"kinds": ["trained", "guided"], "max_delay": 10}}
        given = {"execute_horizon": 50, "delay": 7, "execution": execution} | options
        self.found = evaluate(TASK, infer, [4], policy_name="expert", metadata=about, **given)
        self.plan, (self.outcome,) = expert.plans[4], self.found.outcomes


def test_a_robot_that_waits_stands_still_until_the_answer_comes():
    delayed = Delayed("wait")
    trace = delayed.found.trace
    # Each chunk is asked for at the end of the one before; the first is there at once.
    assert trace.starts == (0, 50, 107, 164, 221, 278)
    still = np.repeat(delayed.plan[49:50], 7, axis=0)
    expected = np.concatenate([delayed.plan[:50], still, delayed.plan[50:100]])
    np.testing.assert_array_equal(trace.executed[:107], expected)
    assert delayed.outcome.waited == 35
    assert delayed.outcome.inner_jump > 0


@pytest.mark.parametrize("execution", ["async", "guided", "trained"])
def test_a_robot_that_goes_on_uses_an_answer_from_the_step_that_it_is_for(execution):
    delayed = Delayed(execution)
    trace = delayed.found.trace
    # The plan depends on time alone, so that nothing must be skipped or repeated.
    np.testing.assert_array_equal(trace.executed, delayed.plan[:300])
    assert trace.starts == (0, 50, 100, 150, 200, 250)
    assert (delayed.outcome.success, delayed.outcome.waited) == (True, 0)
    for asked, start in zip(delayed.requests[1:], trace.starts[1:]):
        if execution == "async":
            assert "rtc" not in asked
            continue
        assert {**asked["rtc"], "previous_chunk": None} == {
            **{"delay": 7, "execute_horizon": 50, "kind": execution, "previous_chunk": None}
        }
        ahead = delayed.plan[start : start + LENGTH - 50]
        np.testing.assert_array_equal(asked["rtc"]["previous_chunk"], ahead)


def test_time_to_success_and_jumps_are_measured():
    """A second chunk that is 0.2 off in one joint: one jump in, one jump back."""
    expert = Expert([4])

    def infer(observations):
        (answer,), step = expert(observations), expert.asked[-1][0][1]
        offset = np.zeros(14)
        offset[2] = 0.2 * (step == 250)
        return [{"actions": answer["actions"] + offset}]

    options = {"execute_horizon": 50, "policy_name": "expert"}
    (exact,) = evaluate(TASK, Expert([4]), [4], **options).outcomes
    (outcome,) = evaluate(TASK, infer, [4], **options).outcomes
    assert outcome.success_step == exact.success_step < 250
    assert outcome.seam_jump == pytest.approx(exact.seam_jump + 0.2 / 5, abs=0.01)
    assert outcome.inner_jump == pytest.approx(exact.inner_jump, abs=1e-3)


def test_chunks_of_one_step_have_a_seam_at_every_step():
    (outcome,) = evaluate(TASK, Expert([4]), [4], execute_horizon=1, policy_name="x").outcomes
    assert outcome.seam_jump > 0
    assert outcome.inner_jump is None


def test_what_the_policy_says_of_its_chunks_is_kept_with_the_outcome(tmp_path):
    expert = Expert([4])

    def infer(observations):
        (answer,), step = expert(observations), expert.asked[-1][0][1]
        return [{**answer, "uncertainty": {"accel": float(step)}}]

    found = evaluate(TASK, infer, [4], execute_horizon=75, policy_name="expert")
    assert found.outcomes[0].uncertainty == {"accel": np.mean([0, 75, 150, 225])}
    found.write(tmp_path)
    assert read_evaluation(tmp_path).outcomes == found.outcomes


def test_a_delay_that_is_measured_is_the_time_of_the_inference():
    def slow(observations):
        time.sleep(0.13)
        return expert(observations)

    expert = Expert([4])
    options = {"execute_horizon": 60, "policy_name": "expert", "delay": None}
    found = evaluate(TASK, slow, [4], num_environments=1, **options)
    # At 50 actions per second, at least 7 steps each; the first answer is waited for.
    late = np.diff(found.trace.starts)[1:] - 60
    assert len(late) == 3
    assert late.min() >= 7
    assert found.delay is None
    with pytest.raises(ValueError, match="one environment at a time"):
        evaluate(TASK, slow, [4], num_environments=2, **options)


def test_the_hand_of_metaworld_stands_still_while_it_waits():
    environment = make_environment("metaworld:drawer-open-halfway")
    resting = environment.resting_action(np.array([0.5, -1, 0.2, 0.7]))
    np.testing.assert_array_equal(resting, [0, 0, 0, 0.7])


def test_half_a_chunk_is_executed_by_default_and_no_more_than_there_is():
    expert = Expert([0])
    assert evaluate(TASK, expert, [0], policy_name="expert").execute_horizon == LENGTH // 2
    with pytest.raises(ValueError, match=r"80 steps, fewer than the 81.*--execute-horizon"):
        evaluate(TASK, expert, [0], execute_horizon=81, policy_name="expert")


def test_subtasks_are_kept_with_the_episode_that_they_belong_to(tmp_path):
    """A policy that goes on with its subtask is told where an episode begins."""
    expert, sessions = Expert([4, 0, 7]), {}

    def infer(observations):
        answers = expert(observations)
        for (seed, step), asked, answer in zip(expert.asked[-1], observations, answers):
            sessions.setdefault(seed, set()).add(asked["session"])
            answer["subtask"] = f"seed {seed}, step {step}"
        return answers

    options = {"execute_horizon": 75, "policy_name": "expert", "num_environments": 2}
    found = evaluate(TASK, infer, [4, 0, 7], metadata={"subtasks": True}, **options)
    found.write(tmp_path)
    steps = (0, 75, 150, 225)
    assert read_evaluation(tmp_path).trace.subtasks == tuple(f"seed 4, step {s}" for s in steps)
    # One session for each episode; those that run at the same time have connections of their own.
    assert [len(found) for found in sessions.values()] == [1, 1, 1]
    numbers = [found.pop() for found in sessions.values()]
    assert len(set(numbers)) == 3
    assert numbers[0] % 2 != numbers[1] % 2


def test_starts_of_recordings_are_in_no_evaluation():
    """A mixture's seeds are shared out among its tasks; a single task's are not."""
    mixture = make_environment("metaworld:drawer-open-halfway,drawer-close-halfway")
    single = make_environment("metaworld:drawer-open-halfway")
    mixture.reset(RECORDING_SEEDS)
    recorded = mixture.pose()
    single.reset(RECORDING_SEEDS)
    np.testing.assert_array_equal(single.pose(), recorded)
    single.reset(RECORDING_SEEDS // 2)
    assert np.abs(single.pose() - recorded).max() > 1e-6


@pytest.fixture(scope="module")
def address():
    torch.manual_seed(0)  # other random weights may succeed by chance
    with running_server(random_policy("tiny_aloha_sim")) as server:
        yield f"ws://127.0.0.1:{server.port}"


def run(address, *words):
    return main(["eval", TASK, "--policy", address, *words])


def test_films_belong_to_the_results_they_lie_with(address, tmp_path):
    words = ("--out", str(tmp_path), "--execute-horizon", "120")
    assert run(address, "--seeds", "0,1", "--video", *words) == 0
    assert {path.name for path in (tmp_path / "videos").iterdir()} == {
        "failure_seed0.mp4",
        "failure_seed1.mp4",
    }
    (tmp_path / "videos" / "mine.mp4").write_bytes(b"not from here")
    assert run(address, "--seeds", "5", "--video", *words) == 0
    assert {path.name for path in (tmp_path / "videos").iterdir()} == {
        "failure_seed5.mp4",
        "mine.mp4",
    }
    assert run(address, "--seeds", "6", *words) == 0
    assert {path.name for path in (tmp_path / "videos").iterdir()} == {"mine.mp4"}


def test_what_was_seen_before_failures_is_a_data_set_without_loss(address, tmp_path):
    words = ("--out", str(tmp_path), "--execute-horizon", "120", "--inspect-failures", "1")
    policy, environment = random_policy("tiny_aloha_sim"), make_environment(TASK)
    for seed in (0, 5):  # the second one replaces the first
        assert run(address, "--seeds", f"{seed},7", *words) == 0
        assert json.loads((tmp_path / "results.json").read_text())["failures"] == "failures"
        frames = Frames.open(policy, tmp_path / "failures")
        assert frames.episodes == {0: 3}
        seen = environment.reset(seed)
        first = frames[0, 0].observation
        for camera, image in seen["images"].items():
            np.testing.assert_array_equal(first["images"][camera], image)
        np.testing.assert_array_equal(first["state"], seen["state"])
        assert first["prompt"] == environment.prompt
        drawn = frames.source.column("seed").ravel()
        np.testing.assert_array_equal(drawn, NOISE_SEEDS * seed + np.array([0, 120, 240]))
    # The column has the noise of the answer; the server's weights are those of this seed.
    torch.manual_seed(0)
    chunk = random_policy("tiny_aloha_sim").infer(first, seed=int(drawn[0]))["actions"]
    np.testing.assert_allclose(frames[0, 0].recorded, chunk, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--episodes", "0"), "--episodes is 0"),
        (("--subtask-interval", "4"), "--subtask-interval is for a checkpoint"),
        (("--episodes", "3", "--seeds", "0..1"), "--seeds names only 2"),
        (("--seeds", "1000000"), "are for recording"),
        (("--seeds", "0", "--opposite"), "has no opposite"),
        (("--opposite", "--inspect-failures", "1"), "Leave out one of them"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_nothing_is_replaced(
    words, message, address, tmp_path, capsys
):
    (tmp_path / "results.json").write_text("precious")
    assert run(address, *words, "--out", str(tmp_path)) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "results.json").read_text() == "precious"


def test_an_evaluation_that_breaks_keeps_the_episodes_that_ended(tmp_path, capsys, monkeypatch):
    policy = random_policy("tiny_aloha_sim")
    healthy = policy.prepare

    def prepare(observation):
        if observation.get("seed", 0) // NOISE_SEEDS == 8:
            raise RuntimeError("out of order")
        return healthy(observation)

    monkeypatch.setattr(policy, "prepare", prepare)
    (tmp_path / "results.json").write_text("precious")
    words = ("--num-environments", "1", "--execute-horizon", "120", "--out", str(tmp_path))
    with running_server(policy, ServerConfig(port=0, name="broken/one")) as server:
        address = f"ws://127.0.0.1:{server.port}"
        assert run(address, "--seeds", "7,8", *words) == 1
        kept = tmp_path / "outcomes.jsonl"
        assert f"The 1 episodes that had ended are in {kept}" in capsys.readouterr().err
        assert [json.loads(line)["seed"] for line in kept.read_text().splitlines()] == [7]
        assert (tmp_path / "results.json").read_text() == "precious"
        assert run(address, "--seeds", "8,7", *words) == 1  # breaks before it has any of its own
        assert "episodes that had ended" not in capsys.readouterr().err
        assert [json.loads(line)["seed"] for line in kept.read_text().splitlines()] == [7]
        assert run(address, "--seeds", "9", *words) == 0
    assert not kept.exists()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["seed"] for one in results["outcomes"]] == [9]
    assert results["policy"] == f"{address} (broken/one)"


def test_an_evaluation_that_is_stopped_says_where_its_episodes_are(
    address, tmp_path, capsys, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "advance", stop)
    words = ("--seeds", "7,8", "--execute-horizon", "120", "--out", str(tmp_path))
    assert run(address, *words) == 130
    assert f"ended are in {tmp_path / 'outcomes.jsonl'}" in capsys.readouterr().err


def test_commands_that_no_simulator_survives_are_a_failure(caplog):
    def wild(observations):
        random = np.random.default_rng(observations[0]["seed"])
        return [{"actions": 20 * random.normal(size=(LENGTH, 14))} for _ in observations]

    found = evaluate(TASK, wild, [0, 1], policy_name="wild", num_environments=2)
    assert found.success.successes == 0
    assert all(outcome.steps < 300 for outcome in found.outcomes)
    assert f"{TASK}, seed 0: the episode ends here" in caplog.text
    again = evaluate(TASK, Expert([4]), [4], policy_name="expert")
    assert again.success.successes == 1


def test_a_robot_that_a_file_describes_gets_the_keys_of_its_data_set():
    keys = {"observation.images.top": "base_0_rgb"}
    robot = RobotInputs("arm", keys, {"observation.state": 14}, {"action": 14}, columns={})
    policy = random_policy("tiny_robot", robot=robot)

    def infer(requests):
        assert policy.infer_batch(requests)[0]["actions"].shape == (16, 14)
        raise InterruptedError  # one request is enough

    with pytest.raises(InterruptedError):
        evaluate(TASK, infer, [0], policy_name="arm", metadata=policy.metadata)


def test_a_policy_of_another_robot_is_told_in_one_line(address, tmp_path, capsys):
    words = ["eval", "metaworld:drawer-open", "--policy", address, "--episodes", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "rejected an observation" in told
    assert "corner4" in told
    assert "Traceback" not in told

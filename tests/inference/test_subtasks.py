"""Subtasks: when a policy writes one, goes on with the last one, or is given one."""

import functools
import re

import numpy as np
import pytest
import torch
from tests.training.two_robots import BRIGHT, DARK, MODEL, QUESTION, observation

from piston.inference import load_policies, subtasks
from piston.inference.loading import random_policy
from piston.inference.policy import Policy
from piston.inference.recording import RecordingPolicy
from piston.inference.subtasks import SubtaskInterval, SubtaskMemory
from piston.models import language


@pytest.mark.parametrize(
    ("text", "chunks", "seconds"),
    [
        ("1", 1, None),
        (" 12 ", 12, None),
        ("2.5s", None, 2.5),
        (".5 s", None, 0.5),
        ("3s", None, 3.0),
    ],
)
def test_an_interval_is_of_chunks_or_seconds(text, chunks, seconds):
    assert SubtaskInterval.parse(text) == SubtaskInterval(chunks, seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "0.0s", "-1", "1.5", "s", "2 m", "inf s", "1e3s"])
def test_other_intervals_are_refused(text):
    with pytest.raises(ValueError, match=f"subtasks is {re.escape(repr(text))}; expected a number"):
        SubtaskInterval.parse(text)


def test_a_text_serves_so_many_chunks():
    memory = SubtaskMemory(SubtaskInterval(3))
    assert memory.recall("a", "go") is None
    memory.store("a", "go", "reach")
    assert [memory.recall("a", "go") for _ in range(4)] == ["reach", "reach", None, None]
    memory.store("a", "go", "lift")
    assert memory.recall("a", "go") == "lift"
    assert memory.recall("b", "go") is None


def test_a_text_serves_so_many_seconds():
    now = 10.0
    memory = SubtaskMemory(SubtaskInterval(None, 2.5), clock=lambda: now)
    memory.store("a", None, "reach")
    for now, expected in ((10.0, "reach"), (12.4, "reach"), (12.5, None), (99.0, None)):  # noqa: B007
        assert memory.recall("a", None) == expected


def test_another_prompt_needs_another_text():
    memory = SubtaskMemory(SubtaskInterval(9))
    memory.store("a", "go", "reach")
    assert memory.recall("a", "stop") is None
    assert memory.recall("a", "go") == "reach"


def test_the_session_that_was_used_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(subtasks, "_MAX_SESSIONS", 2)
    memory = SubtaskMemory(SubtaskInterval(9))
    memory.store("a", "go", "reach")
    memory.store("b", "go", "reach")
    assert memory.recall("a", "go") == "reach"
    memory.store("c", "go", "reach")
    assert [memory.recall(one, "go") for one in "abc"] == ["reach", None, "reach"]


@pytest.fixture(scope="module")
def policies(checkpoint_of_two_robots):
    return load_policies(checkpoint_of_two_robots, num_steps=3)


@pytest.fixture
def arm(policies):
    """The arm's policy, which keeps its subtask for one chunk; nothing is remembered yet."""
    return with_interval(policies["arm"], "1")


@pytest.fixture
def patient(policies):
    """The same, which keeps its subtask for three chunks."""
    return with_interval(policies["arm"], "3")


def with_interval(policy, interval):
    return Policy(policy.model, policy.data, num_steps=3, seed=0, subtask_interval=interval)


@pytest.fixture
def written(monkeypatch):
    """How many texts were written in each call that wrote any."""
    counts, original = [], language.write

    def write(*arguments, ended, **options):
        counts.append(int((~ended).sum()))
        return original(*arguments, ended=ended, **options)

    monkeypatch.setattr(language, "write", write)
    return counts


def test_a_policy_returns_the_subtask_that_it_wrote(arm, written):
    assert arm.metadata["subtasks"] is True
    for brightness, expected in ((DARK, "reach"), (BRIGHT, "lift")):
        result = arm.infer(observation("arm", 7, brightness))
        assert result["subtask"] == expected
        assert result["actions"].shape == (4, 3)
    assert written == [1, 1]


def test_a_given_subtask_is_used_and_not_written(arm, written):
    plain = arm.infer(observation("arm", 7), seed=0)
    assert plain["subtask"] == "reach"
    assert written == [1]
    given = arm.infer(observation("arm", 7, subtask="reach"), seed=0)
    steered = arm.infer(observation("arm", 7, subtask="lift"), seed=0)
    assert written == [1]
    assert (given["subtask"], steered["subtask"]) == ("reach", "lift")
    np.testing.assert_allclose(given["actions"], plain["actions"], atol=1e-5)
    assert np.abs(steered["actions"] - plain["actions"]).max() > 1e-3


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_an_empty_subtask_is_none(arm, nothing, written):
    assert arm.infer(observation("arm", 7, subtask=nothing))["subtask"] == "reach"
    assert written == [1]


def test_what_cannot_be_a_subtask_is_refused(arm):
    with pytest.raises(ValueError, match="has 23 tokens and an end token; the model keeps 12"):
        arm.infer(observation("arm", subtask="reach for the other one"))
    with pytest.raises(ValueError, match="subtask is 3; expected a string"):
        arm.infer(observation("arm", subtask=3))
    with pytest.raises(ValueError, match="subtask is an array of float64; expected a string"):
        arm.infer(observation("arm", subtask=np.zeros(3)))


def test_a_policy_without_subtasks_refuses_one(policies):
    cart = policies["cart"]
    assert "subtasks" not in cart.metadata
    assert "subtask" not in cart.infer(observation("cart"))
    plain = random_policy("pi0_libero")  # of a model without text
    for policy, request in ((cart, observation("cart")), (plain, {})):
        with pytest.raises(ValueError, match="gives the subtask 'reach' to a policy that has no"):
            policy.infer({**request, "subtask": "reach"})


def test_texts_are_written_when_they_are_due(patient, written):
    asked = [observation("arm", 7, DARK, session="a"), observation("arm", 7, BRIGHT, session="a")]
    found = [patient.infer(asked[number > 0])["subtask"] for number in range(7)]
    # Written in front of a dark picture and kept; then in front of a bright one.
    assert found == ["reach"] * 3 + ["lift"] * 4
    assert written == [1, 1, 1]
    patient.infer({**asked[0], "session": "b"})
    patient.infer({**asked[0], "prompt": "take the mug", "session": "b"})
    assert len(written) == 5


def test_seconds_pass_by_the_clock(policies, written):
    policy, now = with_interval(policies["arm"], "2s"), 0.0
    policy.pipeline()._subtasks._clock = lambda: now
    for now in (0.0, 1.9, 2.0, 3.9, 4.1):  # noqa: B007
        policy.infer(observation("arm", 7))
    assert len(written) == 3


def test_given_recalled_and_fresh_texts_in_one_batch(policies, written):
    requests = [
        observation("arm", 1, BRIGHT, seed=1, subtask="reach"),
        observation("arm", 2, BRIGHT, seed=2, session="a"),
        observation("arm", 3, BRIGHT, seed=3, session="b"),
        observation("arm", 4, DARK, seed=4, session="c", subtask="left, left"),
        observation("arm", 5, DARK, seed=5),
    ]
    together, alone = (with_interval(policies["arm"], "3") for _ in range(2))
    for policy in (together, alone):
        policy.infer(observation("arm", 9, DARK, session="a"))
    written.clear()
    found = together.infer_batch(requests)
    assert written == [2]
    texts = [result["subtask"] for result in found]
    assert texts == ["reach", "reach", "lift", "left, left", "reach"]
    for request, result in zip(requests, found, strict=True):
        expected = alone.infer(request)
        assert result["subtask"] == expected["subtask"]
        np.testing.assert_allclose(result["actions"], expected["actions"], atol=1e-5)


def test_a_text_that_ran_into_its_limit_is_written_again(patient, monkeypatch, written):
    """It could not be given: an end token would not fit behind it."""

    def letter_a(logits):
        return torch.full_like(logits.argmax(-1), 100)

    never_ends = functools.partial(language.write, choose=letter_a)
    monkeypatch.setattr(language, "write", never_ends)
    for _ in range(2):
        assert patient.infer(observation("arm"))["subtask"] == MODEL.max_text_len * "a"
    assert written == [1, 1]


def test_seeds_give_the_same_text_and_actions(arm):
    first, again, other = (arm.infer(observation("arm", 7), seed=seed) for seed in (3, 3, 4))
    assert first["subtask"] == again["subtask"] == other["subtask"]
    np.testing.assert_array_equal(first["actions"], again["actions"])
    assert np.abs(first["actions"] - other["actions"]).max() > 1e-3


def test_real_time_chunking_with_every_kind_of_text(policies):
    def prepared():
        policy = with_interval(policies["arm"], "3")
        return policy, policy.infer(observation("arm", 9, session="a"), seed=0)["actions"]

    (together, old), (alone, _) = prepared(), prepared()
    rtc = {"previous_chunk": old[1:], "delay": 1, "execute_horizon": 1}
    requests = [
        observation("arm", 1, BRIGHT, seed=1, rtc=rtc, subtask="reach"),
        observation("arm", 9, BRIGHT, seed=2, rtc=rtc, session="a"),
        observation("arm", 3, BRIGHT, seed=3, rtc=rtc, session="b"),
        observation("arm", 3, BRIGHT, seed=3, session="d"),
    ]
    found = together.infer_batch(requests)
    assert [result["subtask"] for result in found] == ["reach", "reach", "lift", "lift"]
    for request, result in zip(requests, found, strict=True):
        expected = alone.infer(request)
        assert result["subtask"] == expected["subtask"]
        np.testing.assert_allclose(result["actions"], expected["actions"], atol=1e-4)
    joints = slice(1, None)  # the first one is relative to the state
    guided, plain = (np.abs(found[i]["actions"][0] - old[1])[joints].mean() for i in (2, 3))
    assert guided < 0.5 * plain


def test_questions_are_answered_without_actions(policies, written):
    for name, policy in policies.items():
        for brightness, expected in ((DARK, "dark"), (BRIGHT, "bright")):
            asked = observation(name, 7, brightness, question=QUESTION, answer="ignored")
            del asked["prompt"]  # which a question does without
            result = policy.infer(asked)
            assert result["answer"] == expected
            assert result.keys() == {"answer", "policy_timing"}
    assert written == [1] * 4


def test_a_question_leaves_the_subtask_alone(patient, written):
    acting = observation("arm", 7, session="a")
    patient.infer(acting)
    assert patient.infer({**acting, "question": QUESTION})["answer"] == "dark"
    assert patient.infer(acting)["subtask"] == "reach"
    assert written == [1, 1]


def test_questions_and_actions_in_one_batch(arm):
    requests = [
        observation("arm", 1, BRIGHT, seed=1),
        observation("arm", 2, BRIGHT, question=QUESTION),
        observation("arm", 3, DARK, seed=3, subtask="lift"),
        observation("arm", 4, DARK, question=QUESTION),
    ]
    found = arm.infer_batch(requests)
    assert [one.get("answer", one.get("subtask")) for one in found] == [
        *("lift", "bright", "lift", "dark")
    ]
    for request, result in zip(requests, found, strict=True):
        expected = arm.infer(request)
        assert expected.keys() == result.keys()
        if "actions" in expected:
            np.testing.assert_allclose(result["actions"], expected["actions"], atol=1e-5)


def test_a_model_without_text_answers_no_questions():
    with pytest.raises(ValueError, match="answers no questions: it was not trained"):
        random_policy("pi0_libero").infer({"question": "what is it?"})


def test_a_question_is_about_the_camera_that_showed_pictures_in_training(arm):
    seen = arm.prepare(observation("arm", question="what is it?")).inputs["image_mask"]
    assert [slot for slot, shown in seen.items() if shown] == [arm.data.question_slot]


def test_a_session_is_a_number_or_a_text(patient):
    with pytest.raises(ValueError, match=r"session is \[1\]; expected a number or a text"):
        patient.infer(observation("arm", session=[1]))


def test_a_recorded_policy_answers_questions_too(arm, tmp_path):
    policy = RecordingPolicy(arm, tmp_path / "recorded", fps=10.0)
    assert policy.has_sessions
    requests = [observation("arm", 7, question=QUESTION), observation("arm", 7, session="a")]
    answer, actions = policy.infer_batch(requests)
    policy.close()
    assert answer["answer"] == "dark"
    assert actions["subtask"] == "reach"

"""Influence: what is asked, what the numbers are, and what is concluded from them."""

import dataclasses
import json

import numpy as np
import pytest

from piston.inference.policy import Policy
from piston.inspection import Frames, Intervention, Probe, as_json, influence, influence_verdicts
from piston.inspection.questions import ALL, InputChange, opposite
from piston.inspection.verdicts import CARRIED, IGNORED_IN_DEVIATIONS, IGNORED_IN_SPREADS

from . import untrained
from .untrained import BASE_SLOT, STATE, WRIST_SLOT

PLACES = [(0, 1), (1, 4)]
# With seed 1, rounding of float32 changes the chunks of the random π0.5 by up to 3e-4.
SEEDS = (0, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return untrained.record(tmp_path_factory.mktemp("set") / "set")


@pytest.fixture(scope="module", params=untrained.MODELS)
def measured(request, folder):
    policy = untrained.policy(request.param)
    frames = Frames.open(policy, folder)
    probe = Probe(policy, SEEDS)
    return probe, frames, influence(probe, frames, PLACES)


@pytest.fixture(scope="module")
def pi0(folder):
    policy = untrained.policy("pi0")
    frames = Frames.open(policy, folder)
    return influence(Probe(policy, SEEDS), frames, PLACES)


def test_every_input_is_asked_about(pi0):
    changes = {}
    for question in pi0.questions:
        changes.setdefault((question.input, question.subject), []).append(question.change)
    cameras = {("camera", name): ["off", "black", "other"] for name in (BASE_SLOT, WRIST_SLOT, ALL)}
    words = {("word", word): ["left out"] for word in ("open", "close", "the", "drawer")}
    assert changes == {
        **cameras,
        **words,
        ("sentence", ALL): ["empty", "other", "opposite"],
        ("state", ALL): ["other"],
        ("state", "shoulder"): ["moved"],
        ("state", "elbow"): ["moved"],
    }
    assert [tuple(one) for one in pi0.skipped] == [
        (("state", "gripper", "moved"), "it never moves in the dataset")
    ]


def test_numbers_are_those_of_the_probe(measured):
    probe, frames, found = measured
    question = InputChange("camera", WRIST_SLOT, "black")
    place = found.questions.index(question)
    versions = [Intervention(), Intervention(black=(WRIST_SLOT,))]
    pairs = [probe.chunks(frames[one], versions) for one in PLACES]
    changes = np.stack([changed - unchanged for unchanged, changed in pairs]).astype(np.float64)
    np.testing.assert_allclose(found.change[place], np.abs(changes).mean((0, 1)), atol=1e-5)
    actions = frames.source.column("action")
    # The gripper is always told the same, so that it has no deviation to compare with.
    scaled = (changes / actions.std(0, dtype=np.float64).clip(1e-9))[..., :2]
    strength = np.sqrt(np.square(scaled).mean((1, 2, 3)))
    np.testing.assert_allclose(found.strength_per_frame[:, place], strength, rtol=1e-4)
    np.testing.assert_allclose(found.strength[place] ** 2, np.mean(strength**2), rtol=1e-4)
    if probe.noise is None:
        assert found.strength_in_spreads is found.change_in_spreads is found.noise is None
        return
    variance = np.mean([unchanged.var(0, ddof=1) for unchanged, _ in pairs], axis=0)
    np.testing.assert_allclose(found.spread, np.sqrt(variance), rtol=1e-3)
    assert found.strength_in_spreads[place] == pytest.approx(found.strength[place] / found.noise)
    moving = found.change_in_spreads[place, :, :2]
    expected = found.change[place, :, :2] / found.spread[:, :2]
    np.testing.assert_allclose(moving, expected, rtol=1e-6)


def test_carried_errors_are_those_of_the_probe(measured):
    probe, frames, found = measured
    deviation = frames.source.column(STATE)[:, 1].std(dtype=np.float64)
    followed = []
    for place in PLACES:
        below = frames[place].observation[STATE][1] < frames.source.column(STATE)[:, 1].mean()
        amount = deviation if below else -deviation
        versions = [Intervention(), Intervention(state={"elbow": amount})]
        unchanged, changed = probe.chunks(frames[place], versions)
        followed.append((changed - unchanged)[:, :, 1].mean(0) / amount)
    carried = found.carried[found.carried_names.index("elbow")]
    np.testing.assert_allclose(carried, np.mean(followed, 0), atol=1e-4)


def test_a_word_counts_in_the_frames_that_have_it(pi0):
    place = pi0.questions.index(("word", "open", "left out"))
    per_frame = pi0.strength_per_frame[:, place]
    assert np.isnan(per_frame).tolist() == [False, True]
    assert pi0.strength[place] == pytest.approx(per_frame[0])
    expected = per_frame[0] / pi0.noise_per_frame[0]
    assert pi0.strength_in_spreads[place] == pytest.approx(expected)


def test_two_runs_give_equal_numbers_and_plain_json(measured):
    probe, frames, found = measured
    again = influence(Probe(probe.policy, SEEDS), frames, PLACES)
    texts = [json.dumps(as_json(one), allow_nan=False) for one in (found, again)]
    assert texts[0] == texts[1]
    assert len(json.loads(texts[0])["strength"]) == len(found.questions)


def test_states_move_by_a_deviation_towards_the_mean(folder):
    policy = untrained.policy("pi0")
    for parameter in policy.model.suffix.state.parameters():
        parameter.data.zero_()  # It sees no state.
    frames = Frames.open(policy, folder)
    found = influence(Probe(policy, range(2)), frames, PLACES)
    strengths = dict(zip(found.questions, found.strength, strict=True))
    assert strengths["state", "elbow", "moved"] == 0.0
    # The shoulder's actions are relative to its state: they move with it, all of it.
    deviations = [frames.source.column(key)[:, 0].std() for key in (STATE, "action")]
    expected = deviations[0] / deviations[1] / np.sqrt(2)  # one of two actions that move
    assert strengths["state", "shoulder", "moved"] == pytest.approx(expected, rel=1e-4)
    carried = dict(zip(found.carried_names, found.carried, strict=True))
    np.testing.assert_allclose(carried["shoulder"], 1.0, atol=1e-5)
    np.testing.assert_allclose(carried["elbow"], 0.0, atol=1e-6)
    verdicts = {(one.kind, one.subject): one for one in influence_verdicts(found)}
    assert verdicts["state-error-carried", "shoulder"].number == pytest.approx(1.0)
    assert ("state-error-carried", "elbow") not in verdicts


def test_one_sentence_and_one_frame_are_enough(tmp_path):
    policy = untrained.policy("pi0")
    frames = Frames.open(policy, untrained.record(tmp_path / "set", ("wait wait",)))
    found = influence(Probe(policy, range(2)), frames, [(0, 2)])
    reasons = {one.question: one.reason for one in found.skipped}
    assert reasons["sentence", ALL, "other"] == "the dataset has one sentence only"
    assert "has an opposite" in reasons["sentence", ALL, "opposite"]
    asked = [tuple(one) for one in found.questions]
    assert ("word", "wait (2)", "left out") in asked
    assert found.strength[asked.index(("camera", BASE_SLOT, "other"))] > 0.01
    with pytest.raises(ValueError, match="at least one frame"):
        influence(Probe(policy), frames, [])


def test_a_set_of_one_frame_has_nothing_to_put_in_the_place_of_an_input(tmp_path):
    policy = untrained.policy("pi0")
    state = untrained.observation()[STATE][None]
    frames = Frames.open(policy, untrained.write(tmp_path / "set", [("wait", state, state)]))
    frames.action_scale = lambda: np.ones(3)
    found = influence(Probe(policy, range(2)), frames, [(0, 0)])
    assert not [one for one in found.questions if one.change in ("other", "moved")]
    assert not {one.kind for one in influence_verdicts(found)} & OTHER.keys()


def test_a_state_that_moves_by_rounding_only_does_not_move(tmp_path):
    policy = untrained.policy("pi0")
    random = np.random.default_rng(0).normal(0, 1, (6, 3)).astype(np.float32)
    states = 1 + random * np.float32([1e-7, 1, 1])
    frames = Frames.open(policy, untrained.write(tmp_path / "set", [("wait", states, random)]))
    found = influence(Probe(policy, range(2)), frames, [(0, 2)])
    assert "shoulder" not in found.carried_names
    assert "elbow" in found.carried_names


def test_a_policy_with_a_sentence_of_its_own_is_not_asked_about_those_of_the_data_set(folder):
    robot = dataclasses.replace(untrained.ROBOT, prompt="go")
    plain = untrained.policy("pi0", robot)
    policy = Policy(plain.model, dataclasses.replace(plain.data, prompt_from_task=False))
    found = influence(Probe(policy, range(2)), Frames.open(policy, folder), PLACES)
    assert not {"word", "sentence"} & {one.input for one in found.questions}
    assert {one.reason for one in found.skipped if one.question.input == "sentence"} == {
        "the observation has no sentence"
    }


def _with(found, strengths, spread=0.1):
    """The same with other strengths of some questions, in standard deviations."""
    strength = np.ones(len(found.questions))
    for question, value in strengths.items():
        strength[found.questions.index(question)] = value
    return dataclasses.replace(
        found,
        strength=strength,
        strength_in_spreads=None if spread is None else strength / spread,
        noise=spread,
        carried=np.zeros_like(found.carried),
    )


OTHER = {
    "camera-ignored": ("camera", WRIST_SLOT, "other"),
    "cameras-ignored": ("camera", ALL, "other"),
    "sentence-ignored": ("sentence", ALL, "other"),
    "state-ignored": ("state", ALL, "other"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_an_input_is_ignored_if_another_one_changes_nothing(pi0, kind):
    assert influence_verdicts(_with(pi0, {})) == []
    # Below the spread over seeds.
    spreads = 0.8 * IGNORED_IN_SPREADS
    [verdict] = influence_verdicts(_with(pi0, {OTHER[kind]: spreads * 0.1}))
    assert (verdict.kind, verdict.number) == (kind, pytest.approx(spreads))
    assert verdict.threshold == IGNORED_IN_SPREADS
    assert f"{spreads:.2g} of the spread over noise seeds" in verdict.sentence
    # Many spreads of a policy that hardly depends on its noise, and still nothing.
    [verdict] = influence_verdicts(_with(pi0, {OTHER[kind]: 0.001}, spread=1e-5))
    assert (verdict.kind, verdict.threshold) == (kind, IGNORED_IN_DEVIATIONS)
    [verdict] = influence_verdicts(_with(pi0, {OTHER[kind]: 0.001}, spread=None))
    assert verdict.kind == kind
    assert "0.001 of their standard deviation" in verdict.sentence
    # Black and empty are not what counts.
    instead = {"camera": "black", "sentence": "empty"}.get(OTHER[kind][0])
    if instead:
        assert influence_verdicts(_with(pi0, {(*OTHER[kind][:2], instead): 0.0})) == []


def test_verdicts_name_the_robots_camera_and_problems_come_first(pi0):
    weak = {OTHER["state-ignored"]: 0.0, OTHER["camera-ignored"]: 0.0}
    verdicts = influence_verdicts(_with(pi0, weak))
    assert [one.severity for one in verdicts] == ["problem", "remark"]
    assert "the camera observation.images.wrist" in verdicts[0].sentence
    assert verdicts[0].subject == WRIST_SLOT


def test_carried_errors_and_indecision_are_remarks(pi0):
    steps = pi0.carried.shape[1]
    errors = np.stack([np.linspace(1, 0, steps), np.linspace(0.5, CARRIED + 0.1, steps)])
    found = dataclasses.replace(_with(pi0, {}, spread=0.6), carried=errors)
    verdicts = influence_verdicts(found)
    assert [(one.kind, one.subject) for one in verdicts] == [
        ("state-error-carried", "elbow"),
        ("undecided", ""),
    ]
    assert "90% remains" in verdicts[0].sentence


def test_opposites():
    assert opposite("Open the left drawer.") == "Close the right drawer."
    assert opposite("put it in, then push up!") == "put it out, then pull down!"
    assert opposite("transfer the cube") is None
    assert opposite("") is None

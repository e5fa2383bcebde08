"""The probe: versions of an observation, answered as the policy itself would answer them."""

import dataclasses

import numpy as np
import pytest

from piston.inspection import Box, Intervention, Probe

from . import untrained
from .untrained import BASE_SLOT, EMPTY_SLOT, FRONT, IMAGE_SIZE, STATE, WRIST, WRIST_SLOT

PICTURE = untrained.observation(5)[FRONT]
# Changes that can also be made to what the robot sends.
VERSIONS = {
    "unchanged": (Intervention(), {}),
    "sentence": (Intervention(prompt="wait"), {"prompt": "wait"}),
    "black": (Intervention(black=(BASE_SLOT,)), {FRONT: np.zeros_like(PICTURE)}),
    "shown": (Intervention(shown={WRIST_SLOT: PICTURE}), {WRIST: PICTURE}),
    "state": (
        Intervention(state={"shoulder": 0.5, "elbow": 0.5}),
        {STATE: np.float32([0.5, 0.5, 0])},
    ),
    "elbow, hardly": (Intervention(state={"elbow": 1e-4}), {STATE: np.float32([0, 1e-4, 0])}),
}
SEEDS = (3, 8)


@pytest.fixture(scope="module", params=untrained.MODELS)
def policy(request):
    return untrained.policy(request.param)


@pytest.fixture(scope="module")
def pi0():
    return untrained.policy("pi0")


def _robot_sends(change):
    sent = untrained.observation()
    if STATE in change:
        change = {STATE: sent[STATE] + change[STATE]}
    return {**sent, **change}


def test_versions_and_seeds_equal_the_policys_own_answers(policy):
    found = Probe(policy, SEEDS).chunks(
        untrained.observation(), [version for version, _ in VERSIONS.values()]
    )
    seeds = SEEDS if policy.model.config.denoises else (None,)
    assert found.shape[:2] == (len(VERSIONS), len(seeds))
    for chunks, (name, (_, change)) in zip(found, VERSIONS.items(), strict=True):
        for chunk, seed in zip(chunks, seeds, strict=True):
            expected = policy.infer(_robot_sends(change), seed=seed)["actions"]
            np.testing.assert_allclose(chunk, expected, atol=1e-5, err_msg=name)
    if policy.has_sessions:
        changes = (change for _, change in VERSIONS.values())
        texts = {policy.infer(_robot_sends(change))["subtask"] for change in changes}
        assert len(texts) > 1
    # The versions are different questions.
    assert np.abs(found[1:-1] - found[0]).max((1, 2, 3)).min() > 1e-4


def test_a_camera_that_is_off_is_one_that_the_robot_does_not_send():
    optional = untrained.policy("pi0", dataclasses.replace(untrained.ROBOT, optional=(WRIST,)))
    sent = untrained.observation()
    found = Probe(optional, SEEDS).chunks(sent, [Intervention(off=(WRIST_SLOT,))])[0]
    del sent[WRIST]
    for chunk, seed in zip(found, SEEDS, strict=True):
        np.testing.assert_allclose(chunk, optional.infer(sent, seed=seed)["actions"], atol=1e-5)


def test_a_slot_without_a_camera_of_the_robot_has_no_picture(policy):
    assert set(Probe(policy).pictures(untrained.observation())) == {BASE_SLOT, WRIST_SLOT}


def test_the_pixels_of_a_camera_that_is_off_have_no_effect_at_all(policy):
    probe = Probe(policy, SEEDS)
    off = (WRIST_SLOT, EMPTY_SLOT)
    versions = [
        Intervention(off=off),
        Intervention(off=off, black=(WRIST_SLOT,)),
        Intervention(off=off, shown={EMPTY_SLOT: PICTURE}),
        Intervention(off=off, covered=(Box(WRIST_SLOT, 0, 0, 0.5, 1),)),
    ]
    together = probe.chunks(untrained.observation(), versions)
    assert probe.num_prefixes == 1
    alone = [probe.chunks(untrained.observation(), [one])[0] for one in versions]
    for found in (together, alone):
        assert all(np.array_equal(found[0], one) for one in found[1:])


def test_prefixes_are_shared_where_images_and_words_are_equal():
    def counted(kind, versions):
        probe = Probe(untrained.policy(kind), SEEDS)
        probe.chunks(untrained.observation(), versions)
        return probe.num_prefixes, probe.num_chunks

    states = [Intervention(state={"elbow": amount}) for amount in (0.1, 0.2, 0.3)]
    versions = [Intervention(), *states, Intervention(prompt="wait"), Intervention()]
    assert counted("pi0", versions) == (2, 6)
    # The state is written into the prompt.
    assert counted("pi05", versions) == (5, 6)
    assert counted("fast", versions) == (5, 6)


def test_many_versions_are_answered_in_order_and_reported(pi0):
    amounts = np.linspace(0, 1, 150)
    versions = [Intervention(state={"elbow": amount}) for amount in amounts]
    versions[1::3] = [Intervention(prompt=f"sentence {n}") for n in range(50)]
    reports = []
    probe = Probe(pi0, SEEDS[:1])
    found = probe.chunks(untrained.observation(), versions, lambda *done: reports.append(done))
    assert reports[-1] == (150, 150)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    for number in (0, 1, 75, 148, 149):
        alone = probe.chunks(untrained.observation(), [versions[number]])[0]
        np.testing.assert_allclose(found[number], alone, atol=1e-5)


def test_two_runs_give_equal_numbers(policy):
    versions = [version for version, _ in VERSIONS.values()]
    once, again = (Probe(policy).chunks(untrained.observation(), versions) for _ in range(2))
    assert np.array_equal(once, again)


def test_a_covered_rectangle_has_the_mean_colour_of_the_image(pi0):
    sent = untrained.observation()
    box = Box(BASE_SLOT, 0.25, 0.5, 0.5, 1.0)
    seen = Probe(pi0).prepare(sent, Intervention(covered=(box,)))["image"][BASE_SLOT]
    quarter = IMAGE_SIZE // 4
    covered = np.zeros((IMAGE_SIZE, IMAGE_SIZE), bool)
    covered[2 * quarter :, quarter : 2 * quarter] = True
    assert (seen[covered] == sent[FRONT].mean((0, 1)).round()).all()
    assert np.array_equal(seen[~covered], sent[FRONT][~covered])


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (Intervention(off=("top",)), "no camera 'top'; there is base_0_rgb, left_wrist"),
        (Intervention(shown={"top": PICTURE}), "no camera 'top'"),
        (
            Intervention(shown={BASE_SLOT: PICTURE[:8]}),
            r"shown to base_0_rgb has shape \(8, 16, 3\); expected \(16, ",
        ),
        (Intervention(state={"knee": 1.0}), "no state 'knee'; there is shoulder, elbow, gripper"),
    ],
)
def test_what_is_not_there_is_named(pi0, intervention, message):
    with pytest.raises((LookupError, ValueError), match=message):
        Probe(pi0).chunks(untrained.observation(), [intervention])


@pytest.mark.parametrize("sides", [(0.5, 0, 0.5, 1), (0, -0.1, 1, 1), (0, 0, 1, float("nan"))])
def test_a_box_outside_the_image_is_refused(sides):
    with pytest.raises(ValueError, match="expected shares of the image between 0 and 1, in order"):
        Box(BASE_SLOT, *sides)


def test_no_seed_is_refused(pi0):
    with pytest.raises(ValueError, match="at least one seed"):
        Probe(pi0, ())

"""Policies with known faults get the verdicts that name them, and a good one gets none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from piston.inference.loading import load_policy
from piston.inference.policy import Policy
from piston.inference.recording import RecordingPolicy
from piston.inspection import Frames, Probe, influence, influence_verdicts
from piston.inspection.live import compare
from piston.inspection.live_verdicts import live_verdicts
from piston.serving import running_server
from piston.transforms import Data
from piston_client import Client

from . import tiny

FRONT, WRIST = tiny.MODEL.cameras
Trained = Callable[[tiny.Fault | None], tuple[Policy, Frames]]


@pytest.fixture(scope="module", autouse=True)
def _shapes_are_not_checked(shapes_checked):
    """Other tests check them; here they would take half of the time."""
    with shapes_checked(False):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    """The policy that was trained on a data set with a fault, and that data set."""

    @functools.cache
    def build(fault: tiny.Fault | None) -> tuple[Policy, Frames]:
        folder = tmp_path_factory.mktemp("policy")
        data = tiny.record(folder / "data", fault)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PISTON_HOME", str(folder / "home"))
            checkpoint = tiny.train(data, folder)
        policy = load_policy(checkpoint)
        return policy, Frames.open(policy, data)

    return build


def problems(policy: Policy, frames: Frames) -> set[tuple[str, str]]:
    found = influence(Probe(policy), frames, frames.spread_out(24))
    verdicts = influence_verdicts(found)
    return {(one.kind, one.subject) for one in verdicts if one.severity == "problem"}


EXPECTED = {
    None: set(),
    "pictures shuffled": {
        *(("camera-ignored", FRONT), ("camera-ignored", WRIST), ("cameras-ignored", "all")),
    },
    "sentences shuffled": {("sentence-ignored", "")},
    "wrist camera black": {("camera-ignored", WRIST)},
}


@pytest.mark.parametrize("fault", EXPECTED, ids=str)
def test_what_training_did_not_connect_with_the_actions_is_ignored(trained, fault):
    assert problems(*trained(fault)) == EXPECTED[fault]


def swap_red_and_blue(observation: Data) -> Data:
    return observation | {key: observation[key][..., ::-1] for key in tiny.ROBOT.cameras}


def shift_state(observation: Data) -> Data:
    return observation | {tiny.STATE: observation[tiny.STATE] + np.float32(0.1)}


def drive(infer: Callable[[Data], Data], see: Callable[[Data], Data]) -> None:
    """Let a policy move the arm, one inference per step, as it sees the world through `see`."""
    for number, sentence in enumerate(tiny.SIDES):
        world = tiny.World(np.random.default_rng([7, number]), sentence)
        for step in range(6 * tiny.STEPS):
            if step % tiny.STEPS == 0:
                world.move_things()
            observation = see(world.observation()) | {"seed": step}
            world.joints = infer(observation)["actions"][0]


def live_problems(policy: Policy, training: Frames, recording: Path) -> set[tuple[str, str]]:
    live = Frames.open(policy, recording, needs_cameras=False)
    found = live_verdicts(compare(policy, training, live))
    return {(one.kind, one.subject) for one in found if one.severity == "problem"}


def test_a_state_that_is_shifted_live_is_recognised(trained, tmp_path):
    policy, training = trained(None)
    found = {}
    for name, see in {"as trained": dict, "shifted": shift_state}.items():
        ticks = itertools.count()
        recording = RecordingPolicy(
            policy, tmp_path / name, tiny.FPS, clock=lambda ticks=ticks: next(ticks) / tiny.FPS
        )
        drive(lambda seen, policy=recording: policy.infer_batch([seen])[0], see)
        recording.close()
        found[name] = live_problems(policy, training, tmp_path / name)
    assert found["as trained"] == set()
    assert {kind for kind, _ in found["shifted"]} == {"state-offset"}


def test_red_and_blue_that_are_swapped_live_are_recognised(trained, tmp_path):
    policy, training = trained(None)
    recording = RecordingPolicy(policy, tmp_path / "live", tiny.FPS)
    with running_server(recording) as server, Client(server.url) as client:
        drive(client.infer, swap_red_and_blue)
    recording.close()
    found = live_problems(policy, training, tmp_path / "live")
    swapped = {("red-blue-swapped", camera) for camera in tiny.ROBOT.cameras}
    assert swapped <= found
    # This robot does not wait between its steps, and what the policy sees leads it astray.
    assert {kind for kind, _ in found - swapped} <= {"rate", "state-outside-range"}

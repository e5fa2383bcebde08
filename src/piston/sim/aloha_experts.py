"""Scripted experts for the simulated ALOHA robot: cube transfer and peg insertion.

An expert is a table per arm: at this step, the finger tips here, pointing so, this far open. The
tables become joint angles (aloha_kinematics) and smooth motion between them, planned once from
where the objects lie at the start. Nothing is corrected on the way: nothing needs to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float

from piston.sim.aloha_kinematics import LEFT, RIGHT, Arm, Grasp, joints_for
from piston.sim.environment import Demonstration, Environment, Expert

# Six joints and a gripper, at a step.
Waypoint = tuple[int, Float[np.ndarray, " 7"]]
Plan = Float[np.ndarray, "t 14"]
Poses = dict[str, Sequence[float]]

OPEN, CLOSED = 1.0, 0.0
_REST = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, CLOSED])

TRANSFER_STEPS = 230
INSERTION_STEPS = 230

# Finger tips are this high when something lies between them: deeper, and they rub on the table.
_CUBE_HEIGHT = 0.025
_PEG_HEIGHT = 0.023
_SOCKET_HEIGHT = 0.026
_ABOVE = 0.12


class ScriptedAloha(Expert):
    """Carries out a plan that is made when the episode starts."""

    def __init__(self, make_plan: Callable[[Poses], Plan]) -> None:
        self._make_plan = make_plan
        self._actions: Iterator[np.ndarray] = iter(())

    def start(self, environment: Environment) -> None:
        self._actions = iter(self._make_plan(environment.initial_state()["objects"]))

    def act(self) -> Demonstration | None:
        action = next(self._actions, None)
        return None if action is None else Demonstration(action, action)


def plan_transfer(poses: Poses) -> Plan:
    """The right arm lifts the cube to the middle, the left one takes it there from the side."""
    x, y, _ = poses["cube"][:3]
    # Square to the cube would twist the forearm most, along the arm would grip its edges.
    yaw = RIGHT.bearing(np.array([x, y, 0.0])) / 2
    pick = {"yaw": yaw, "pitch": np.radians(72)}
    give = {"pitch": np.radians(64)}
    take = {"roll": np.pi / 2}  # fingers above and below, where the right arm's are not
    right = [
        (0, _REST),
        _at(34, RIGHT, (x, y, _ABOVE), OPEN, **pick),
        _at(58, RIGHT, (x, y, _CUBE_HEIGHT), OPEN, **pick),
        _at(66, RIGHT, (x, y, _CUBE_HEIGHT), CLOSED, **pick),
        _at(74, RIGHT, (x, y, _CUBE_HEIGHT), CLOSED, **pick),
        _at(120, RIGHT, (0, 0.5, 0.28), CLOSED, **give),
        _at(172, RIGHT, (0, 0.5, 0.28), CLOSED, **give),
        _at(180, RIGHT, (0, 0.5, 0.28), OPEN, **give),
        _at(184, RIGHT, (0, 0.5, 0.28), OPEN, **give),
        _at(208, RIGHT, (0.1, 0.5, 0.36), OPEN, **give),
    ]
    left = [
        (0, _REST),
        (50, _REST),
        _at(112, LEFT, (-0.12, 0.5, 0.28), OPEN, **take),
        _at(124, LEFT, (-0.12, 0.5, 0.28), OPEN, **take),
        _at(146, LEFT, (0.012, 0.5, 0.28), OPEN, **take),
        _at(154, LEFT, (0.012, 0.5, 0.28), CLOSED, **take),
        _at(184, LEFT, (0.012, 0.5, 0.28), CLOSED, **take),
        _at(212, LEFT, (-0.06, 0.5, 0.28), CLOSED, **take),
    ]
    return np.concatenate([move(left, TRANSFER_STEPS), move(right, TRANSFER_STEPS)], axis=1)


def plan_insertion(poses: Poses) -> Plan:
    """Both arms lift what lies before them to the middle; the peg is pushed into the socket."""
    # Centres when the peg meets the pin inside the socket are 0.1 m apart. The peg sags a little.
    socket = _bring(LEFT, poses["socket"], _SOCKET_HEIGHT, (-0.08, 0.5, 0.2), (-0.05, 0.5, 0.2))
    peg = _bring(RIGHT, poses["peg"], _PEG_HEIGHT, (0.11, 0.5, 0.203), (0.03, 0.5, 0.203))
    return np.concatenate([move(socket, INSERTION_STEPS), move(peg, INSERTION_STEPS)], axis=1)


def _bring(
    arm: Arm,
    pose: Sequence[float],
    height: float,
    before: tuple[float, float, float],
    final: tuple[float, float, float],
) -> list[Waypoint]:
    """Pick up what lies along the arm, bring it in front of the other part, push."""
    x, y, _ = pose[:3]
    pitch = np.radians(72)
    return [
        (0, _REST),
        _at(38, arm, (x, y, _ABOVE), OPEN, pitch=pitch),
        _at(62, arm, (x, y, height), OPEN, pitch=pitch),
        _at(66, arm, (x, y, height), CLOSED, pitch=pitch),
        _at(86, arm, (x, y, height), CLOSED, pitch=pitch),  # the fingers are slow
        _at(136, arm, before, CLOSED, pitch=pitch),
        _at(146, arm, before, CLOSED, pitch=pitch),
        _at(196, arm, final, CLOSED, pitch=pitch),
    ]


def _at(
    step: int, arm: Arm, position: tuple[float, float, float], gripper: float, **angles: float
) -> Waypoint:
    return step, np.append(joints_for(arm, Grasp(position, **angles)), gripper)


def move(waypoints: Sequence[Waypoint], num_steps: int) -> Float[np.ndarray, "t 7"]:
    """Joint targets for every step: from rest to rest between waypoints, without jerks."""
    targets = np.empty((num_steps, 7))
    for (begin, start), (end, goal) in itertools.pairwise(waypoints):
        way = np.arange(1, end - begin + 1)[:, None] / (end - begin)
        targets[begin:end] = start + way**3 * (10 - 15 * way + 6 * way**2) * (goal - start)
    targets[waypoints[-1][0] :] = waypoints[-1][1]
    return targets

"""Scripted experts for the simulated ALOHA robot: cube transfer and peg insertion.

An expert is a table per arm: at this step, the finger tips are at this place, the gripper has this
orientation and is open or closed. Closed-form inverse kinematics turn the tables into joint angles,
with smooth motion between them, planned once from the initial poses of the objects. The tables also
name the parts of the task.

    waist ─ shoulder ─ upper arm ─ elbow ─ forearm ─┬─ forearm roll, wrist angle, wrist rotate
                                                    └─ their axes meet in one point: the wrist

The position of the wrist determines the first three joints, the orientation of the gripper the
last three. Each arm has its own frame: x points to the middle of the table, y to the arm's left,
z up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from piston.sim.environment import Demonstration, Environment, Expert

Position = tuple[float, float, float]

# -- inverse kinematics

# Metres, from the robot's model.
_SHOULDER_HEIGHT = 0.12705
_UPPER_ARM = (0.05955, 0.3)  # forwards and up, when all joints are 0
_FOREARM = 0.3
_WRIST_TO_GRIPPER = 0.069744
# From the gripper's origin to where its finger tips hold things.
_GRIPPER_TO_GRASP = 0.135

_UPPER_LENGTH = float(np.hypot(*_UPPER_ARM))
_UPPER_LEAN = float(np.arctan2(*_UPPER_ARM))
# Below this, forearm roll and wrist rotate turn about the same axis.
_ALIGNED = 1e-6


class Arm(NamedTuple):
    """The base of one arm and its orientation in the room."""

    base: tuple[float, float]
    # +1 if the arm's x axis is the room's, −1 if the arm faces the other way.
    facing: int

    def local(self, position: Position) -> Float[np.ndarray, " 3"]:
        """Transform a point of the room to the arm's frame."""
        x, y, z = position
        return np.array([self.facing * (x - self.base[0]), self.facing * (y - self.base[1]), z])


LEFT = Arm(base=(-0.469, 0.5), facing=1)
RIGHT = Arm(base=(0.469, 0.5), facing=-1)


def joints_for(
    arm: Arm, position: Position, yaw: float = 0.0, pitch: float = 0.0, roll: float = 0.0
) -> Float[np.ndarray, " 6"]:
    """Return waist, shoulder, elbow, forearm roll, wrist angle and wrist rotate.

    `position` is where the finger tips are, in the room. The angles are in the arm's frame: at 0
    the gripper points straight ahead and its fingers open sideways; `pitch` tips it down, `yaw`
    turns it to the left, `roll` turns the fingers about the gripper's own axis. Raise ValueError
    if the position is out of reach.
    """
    rotation = _about(2, yaw) @ _about(1, pitch) @ _about(0, roll)
    wrist = arm.local(position) - (_WRIST_TO_GRIPPER + _GRIPPER_TO_GRASP) * rotation[:, 0]
    waist = np.arctan2(wrist[1], wrist[0])
    shoulder, elbow = _reach(float(np.hypot(*wrist[:2])), wrist[2] - _SHOULDER_HEIGHT)
    forearm = _about(2, waist) @ _about(1, shoulder + elbow)
    return np.array([waist, shoulder, elbow, *_turn_wrist(forearm.T @ rotation)])


def _reach(forwards: float, up: float) -> tuple[float, float]:
    """Return shoulder and elbow for this wrist position, with the elbow up."""
    distance = np.hypot(forwards, up)
    cosine = (_UPPER_LENGTH**2 + distance**2 - _FOREARM**2) / (2 * _UPPER_LENGTH * distance)
    if abs(cosine) > 1:
        raise ValueError(
            f"The grasp is out of reach: the wrist would be {distance:.3f} m from the shoulder, "
            f"the arm spans {_UPPER_LENGTH - _FOREARM:.3f} to {_UPPER_LENGTH + _FOREARM:.3f} m."
        )
    # Of the upper arm, from the vertical; of the forearm, below the horizontal.
    lean = np.pi / 2 - np.arctan2(up, forwards) - np.arccos(cosine)
    rise = up - _UPPER_LENGTH * np.cos(lean)
    dip = -np.arctan2(rise, forwards - _UPPER_LENGTH * np.sin(lean))
    shoulder = lean - _UPPER_LEAN
    return shoulder, dip - shoulder


def _turn_wrist(rotation: Float[np.ndarray, "3 3"]) -> tuple[float, float, float]:
    """Return the angles about x, y, x of the rotation; of the two solutions, the smaller roll."""
    angle = np.arccos(np.clip(rotation[0, 0], -1.0, 1.0))
    if angle < _ALIGNED:
        return 0.0, 0.0, float(np.arctan2(rotation[2, 1], rotation[1, 1]))
    roll = np.arctan2(rotation[1, 0], -rotation[2, 0])
    rotate = np.arctan2(rotation[0, 1], rotation[0, 2])
    if abs(roll) > np.pi / 2:
        return roll - np.copysign(np.pi, roll), -angle, rotate - np.copysign(np.pi, rotate)
    return roll, angle, rotate


def _about(axis: int, angle: float) -> Float[np.ndarray, "3 3"]:
    """Return the rotation about x (0), y (1) or z (2)."""
    first, second = (axis + 1) % 3, (axis + 2) % 3
    rotation = np.eye(3)
    rotation[first, first] = rotation[second, second] = np.cos(angle)
    rotation[second, first] = np.sin(angle)
    rotation[first, second] = -np.sin(angle)
    return rotation


# -- plans

Poses = dict[str, Sequence[float]]

OPEN, CLOSED = 1.0, 0.0
_REST = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, CLOSED])
_NUM_STEPS = 230

# Height of the finger tips while they hold something; lower, they would touch the table.
_CUBE_HEIGHT = 0.025
_PEG_HEIGHT = 0.023
_SOCKET_HEIGHT = 0.026
_ABOVE = 0.12


class Row(NamedTuple):
    """From this step on the finger tips are there and the gripper is open or closed.

    The motion to this place begins at the step of the row before. `subtask` is the part of the task
    that begins with this motion, "" if a part continues; it lasts until the next part begins in
    either table. Image and joints must show at a single moment which part it is.
    """

    step: int
    position: Position
    gripper: float
    angles: Mapping[str, float]
    subtask: str = ""


class Plan(NamedTuple):
    """What happens in every step of an episode."""

    actions: Float[np.ndarray, "t 14"]
    subtasks: list[str]


class ScriptedAloha(Expert):
    """Executes a plan that is made when the episode starts."""

    def __init__(self, make_plan: Callable[[Poses], Plan]) -> None:
        self._make_plan = make_plan
        self._steps: Iterator[tuple[np.ndarray, str]] = iter(())

    def start(self, environment: Environment) -> None:
        plan = self._make_plan(environment.initial_state()["objects"])
        self._steps = zip(plan.actions, plan.subtasks, strict=True)

    def act(self) -> Demonstration | None:
        action, subtask = next(self._steps, (None, ""))
        return None if action is None else Demonstration(action, action, subtask)


def plan_transfer(poses: Poses) -> Plan:
    """The right arm lifts the cube to the middle, the left one takes it there from the side."""
    x, y, _ = poses["cube"][:3]
    above, cube = (x, y, _ABOVE), (x, y, _CUBE_HEIGHT)
    # Aligned with the cube would twist the forearm most; along the arm would grip its edges.
    ahead, aside, _ = RIGHT.local(cube)
    pick = {"yaw": float(np.arctan2(aside, ahead)) / 2, "pitch": np.radians(72)}
    middle, give = (0, 0.5, 0.28), {"pitch": np.radians(64)}
    right = [
        Row(34, above, OPEN, pick, "reach for the cube"),
        Row(58, cube, OPEN, pick),
        Row(66, cube, CLOSED, pick, "grasp the cube"),
        Row(74, cube, CLOSED, pick),
        Row(120, middle, CLOSED, give, "bring it to the middle"),
        Row(172, middle, CLOSED, give),
        Row(180, middle, OPEN, give),
        Row(184, middle, OPEN, give),
        Row(208, (0.1, 0.5, 0.36), OPEN, give, "move apart"),
    ]
    # Fingers above and below, where the right arm's are not.
    beside, taken, take = (-0.12, 0.5, 0.28), (0.012, 0.5, 0.28), {"roll": np.pi / 2}
    left = [
        Row(112, beside, OPEN, take),
        Row(124, beside, OPEN, take),
        Row(146, taken, OPEN, take, "approach from the left"),
        Row(154, taken, CLOSED, take, "hand it over"),
        Row(184, taken, CLOSED, take),
        Row(212, (-0.06, 0.5, 0.28), CLOSED, take),
    ]
    return _plan(left, right, left_start=50)


def plan_insertion(poses: Poses) -> Plan:
    """Both arms lift what lies before them to the middle; the peg is pushed into the socket."""
    # The centres are 0.1 m apart when the peg meets the pin in the socket. The peg sags a little.
    socket = _bring(poses["socket"], _SOCKET_HEIGHT, (-0.08, 0.5, 0.2), (-0.05, 0.5, 0.2))
    peg = _bring(poses["peg"], _PEG_HEIGHT, (0.11, 0.5, 0.203), (0.03, 0.5, 0.203))
    return _plan(socket, peg)


def _bring(pose: Sequence[float], height: float, before: Position, final: Position) -> list[Row]:
    """Pick up what lies along the arm, bring it in front of the other part, push."""
    x, y, _ = pose[:3]
    down = {"pitch": np.radians(72)}
    return [
        Row(38, (x, y, _ABOVE), OPEN, down, "reach for both parts"),
        Row(62, (x, y, height), OPEN, down),
        Row(66, (x, y, height), CLOSED, down, "grasp them"),
        # The fingers are slow. What is held and does not move looks the same at every step, so the
        # next part of the task begins with the wait, when the fingers have closed.
        Row(76, (x, y, height), CLOSED, down),
        Row(86, (x, y, height), CLOSED, down, "bring them together"),
        Row(136, before, CLOSED, down),
        Row(146, before, CLOSED, down, "insert the peg"),
        Row(196, final, CLOSED, down),
    ]


def _plan(left: Sequence[Row], right: Sequence[Row], left_start: int = 0) -> Plan:
    """Return the steps of both arms; the left one rests until `left_start`."""
    actions = [_move(LEFT, left, left_start), _move(RIGHT, right)]
    begins = {
        begin: row.subtask
        for start, rows in ((left_start, left), (0, right))
        for begin, row in zip([start, *(row.step for row in rows)], rows)
        if row.subtask
    }
    subtasks = [begins[max(x for x in begins if x <= step)] for step in range(_NUM_STEPS)]
    return Plan(np.concatenate(actions, axis=1), subtasks)


def _move(arm: Arm, rows: Sequence[Row], start: int = 0) -> Float[np.ndarray, "t 7"]:
    """Return joint targets for every step: at rest until `start`, then minimum-jerk motion."""
    waypoints = [(start, _REST)]
    for step, position, gripper, angles, _ in rows:
        waypoints.append((step, np.append(joints_for(arm, position, **angles), gripper)))
    targets = np.tile(_REST, (_NUM_STEPS, 1))
    for (begin, before), (end, goal) in itertools.pairwise(waypoints):
        way = np.arange(1, end - begin + 1)[:, None] / (end - begin)
        targets[begin:end] = before + way**3 * (10 - 15 * way + 6 * way**2) * (goal - before)
    targets[waypoints[-1][0] :] = waypoints[-1][1]
    return targets

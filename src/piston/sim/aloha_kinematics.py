"""Where ALOHA's joints must stand for a gripper to be somewhere: exact, in closed form.

    waist ─ shoulder ─ upper arm ─ elbow ─ forearm ─┬─ forearm roll, wrist angle, wrist rotate
                                                    └─ their axes meet in one point: the wrist

So the wrist's position decides the first three joints, and the gripper's orientation the last
three. Knows the arm's lengths; knows nothing of tasks or of MuJoCo.

Each arm has its own frame: x points to the middle of the table, y to its own left, z up.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

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


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the two arms, and how the room looks from its base."""

    base: tuple[float, float]
    # +1 if the arm's x axis is the room's, −1 if the arm faces the other way.
    facing: int

    def local(self, position: Float[np.ndarray, " 3"]) -> Float[np.ndarray, " 3"]:
        """A point of the room, in the arm's frame."""
        x, y, z = position
        return np.array([self.facing * (x - self.base[0]), self.facing * (y - self.base[1]), z])

    def bearing(self, position: Float[np.ndarray, " 3"]) -> float:
        """The angle by which the waist turns to face a point of the room."""
        x, y, _ = self.local(position)
        return float(np.arctan2(y, x))


LEFT = Arm(base=(-0.469, 0.5), facing=1)
RIGHT = Arm(base=(0.469, 0.5), facing=-1)


@dataclasses.dataclass(frozen=True)
class Grasp:
    """Where the finger tips are, in the room; how the gripper points, in the arm's frame, radians.

    At angles 0 the gripper points straight ahead and its fingers open sideways. `pitch` tips it
    down, `yaw` turns it to the left, `roll` turns the fingers about the gripper's own axis.
    """

    position: tuple[float, float, float]
    yaw: float = 0.0
    pitch: float = 0.0
    roll: float = 0.0


def joints_for(arm: Arm, grasp: Grasp) -> Float[np.ndarray, " 6"]:
    """Waist, shoulder, elbow, forearm roll, wrist angle, wrist rotate. Raises if out of reach."""
    rotation = _about_z(grasp.yaw) @ _about_y(grasp.pitch) @ _about_x(grasp.roll)
    gripper = _WRIST_TO_GRIPPER + _GRIPPER_TO_GRASP
    wrist = arm.local(np.array(grasp.position)) - gripper * rotation[:, 0]
    waist = np.arctan2(wrist[1], wrist[0])
    shoulder, elbow = _reach(float(np.hypot(*wrist[:2])), wrist[2] - _SHOULDER_HEIGHT, grasp)
    forearm = _about_z(waist) @ _about_y(shoulder + elbow)
    return np.array([waist, shoulder, elbow, *_turn_wrist(forearm.T @ rotation)])


def _reach(forwards: float, up: float, grasp: Grasp) -> tuple[float, float]:
    """Shoulder and elbow that bring the wrist there, elbow up."""
    distance = np.hypot(forwards, up)
    cosine = (_UPPER_LENGTH**2 + distance**2 - _FOREARM**2) / (2 * _UPPER_LENGTH * distance)
    if abs(cosine) > 1:
        raise ValueError(
            f"{grasp} is out of reach: the wrist would be {distance:.3f} m from the shoulder, the "
            f"arm spans {_UPPER_LENGTH - _FOREARM:.3f} to {_UPPER_LENGTH + _FOREARM:.3f} m."
        )
    # Of the upper arm, from the vertical; of the forearm, below the horizontal.
    lean = np.pi / 2 - np.arctan2(up, forwards) - np.arccos(cosine)
    rise = up - _UPPER_LENGTH * np.cos(lean)
    dip = -np.arctan2(rise, forwards - _UPPER_LENGTH * np.sin(lean))
    shoulder = lean - _UPPER_LEAN
    return shoulder, dip - shoulder


def _turn_wrist(rotation: Float[np.ndarray, "3 3"]) -> tuple[float, float, float]:
    """Angles about x, y, x that make the rotation; of the two ways, the one that rolls less."""
    angle = np.arccos(np.clip(rotation[0, 0], -1.0, 1.0))
    if angle < _ALIGNED:
        return 0.0, 0.0, float(np.arctan2(rotation[2, 1], rotation[1, 1]))
    roll = np.arctan2(rotation[1, 0], -rotation[2, 0])
    rotate = np.arctan2(rotation[0, 1], rotation[0, 2])
    if abs(roll) > np.pi / 2:
        return _half_turn(roll), -angle, _half_turn(rotate)
    return roll, angle, rotate


def _half_turn(angle: float) -> float:
    return angle - np.copysign(np.pi, angle)


def _about_x(angle: float) -> Float[np.ndarray, "3 3"]:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])


def _about_y(angle: float) -> Float[np.ndarray, "3 3"]:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, 0, sine], [0, 1, 0], [-sine, 0, cosine]])


def _about_z(angle: float) -> Float[np.ndarray, "3 3"]:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])

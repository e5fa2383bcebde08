"""MetaWorld's tasks by name: prompt, initial state, parts. Plain data that imports no simulator.

Four tasks are Piston's own: drawer and window start half open, so that the image alone does not
show whether to open or to close them.
"""

from __future__ import annotations

import dataclasses

ACTION_REPEAT = 2
PACKAGE_MAX_STEPS = 500
_HALFWAY_MAX_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Halfway:
    """An initial state in the middle, the same for a task and its opposite."""

    joint: str
    # Range of the joint's initial position: as far from open as from closed.
    span: tuple[float, float]
    # Range of the object's position.
    low: tuple[float, float, float]
    high: tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Thing:
    """What a task moves, and a question about it."""

    name: str
    joint: str
    question: str
    # Each answer with the range of the joint's position in which it is right.
    answers: tuple[tuple[str, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The two parts of a task: the hand reaches for a thing and then moves it.

    The second part has begun if the hand is in a box about the thing, or if the thing has moved
    beyond the positions where it starts. Both can be seen in the image.
    """

    thing: Thing
    reach: str
    move: str
    # Ranges of the hand's position relative to the package's position of the thing, in metres.
    box: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    # Range of the joint's position.
    moved: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class MetaworldTask:
    """A task of the package with its prompt and initial state."""

    name: str
    # The package's name for it.
    package_name: str
    prompt: str
    max_steps: int = PACKAGE_MAX_STEPS // ACTION_REPEAT
    start: Halfway | None = None
    opposite_prompt: str | None = None
    # Only of the tasks in the mixture "tiny".
    parts: Parts | None = None


_PROMPTS = {
    "assembly": "put the ring on the peg",
    "basketball": "drop the ball into the basket",
    "bin-picking": "move the cube to the other bin",
    "box-close": "put the lid on the box",
    "button-press": "press the button on the wall",
    "button-press-topdown": "press the button",
    "button-press-topdown-wall": "press the button behind the wall",
    "button-press-wall": "reach around the wall and press the button",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial",
    "disassemble": "take the ring off the peg",
    "door-close": "close the door",
    "door-lock": "lock the door",
    "door-open": "open the door",
    "door-unlock": "unlock the door",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-close": "turn the faucet to the right",
    "faucet-open": "turn the faucet to the left",
    "hammer": "hammer the nail into the wall",
    "hand-insert": "put the hand into the hole",
    "handle-press": "press the handle down",
    "handle-press-side": "press the handle down from the side",
    "handle-pull": "pull the handle up",
    "handle-pull-side": "pull the handle up from the side",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "insert the peg into the hole",
    "peg-unplug-side": "unplug the peg",
    "pick-out-of-hole": "take the puck out of the hole",
    "pick-place": "pick up the puck and hold it at the goal",
    "pick-place-wall": "bring the puck over the wall to the goal",
    "plate-slide": "slide the plate into the cabinet",
    "plate-slide-back": "slide the plate out of the cabinet",
    "plate-slide-back-side": "slide the plate out of the cabinet sideways",
    "plate-slide-side": "slide the plate into the cabinet sideways",
    "push": "push the puck to the goal",
    "push-back": "pull the puck back to the goal",
    "push-wall": "push the puck around the wall to the goal",
    "reach": "reach the goal",
    "reach-wall": "reach over the wall to the goal",
    "shelf-place": "put the cube on the shelf",
    "soccer": "kick the ball into the goal",
    "stick-pull": "pull the box with the stick",
    "stick-push": "push the box with the stick",
    "sweep": "sweep the cube off the table",
    "sweep-into": "sweep the cube into the hole",
    "window-close": "close the window",
    "window-open": "open the window",
}

_DRAWER = Halfway("goal_slidey", (-0.13, -0.11), (-0.1, 0.9, 0.0), (0.1, 0.9, 0.0))
_WINDOW = Halfway("window_slide", (0.09, 0.11), (-0.1, 0.75, 0.16), (0.1, 0.9, 0.16))

_PRESS = "button-press-topdown"
_FAR = 1.0
_DRAWER_THING = Thing(
    *("drawer", _DRAWER.joint, "is the drawer open?"),
    (("yes", -_FAR, -0.16), ("half open", -0.135, -0.09), ("no", -0.035, _FAR)),
)
_WINDOW_THING = Thing(
    *("window", _WINDOW.joint, "is the window open?"),
    (("no", -_FAR, 0.045), ("half open", 0.08, 0.12), ("yes", 0.17, _FAR)),
)
_BUTTON_THING = Thing(
    *("button", "btnbox_joint", "is the button pressed?"),
    (("yes", -_FAR, -0.06), ("no", -0.01, _FAR)),
)
# The package's position of the drawer's handle is 5 cm higher in drawer-close than in drawer-open,
# that of the window's handle is 8 cm above the place where the hand pushes it. The hand's position
# is 5 cm above the button when the fingers touch it.
_PARTS = {
    "drawer-open": Parts(
        *(_DRAWER_THING, "reach for the handle", "pull the drawer open"),
        box=((-0.06, 0.06), (-0.06, 0.06), (-_FAR, 0.02)),
        moved=(-_FAR, -0.14),
    ),
    "drawer-close": Parts(
        *(_DRAWER_THING, "reach for the handle", "push the drawer shut"),
        box=((-0.06, 0.06), (-0.045, 0.0), (-_FAR, -0.005)),
        moved=(-0.1, _FAR),
    ),
    "window-open": Parts(
        *(_WINDOW_THING, "reach for the handle", "slide the window open"),
        box=((-0.06, 0.02), (-0.06, 0.02), (-_FAR, -0.07)),
        moved=(0.12, _FAR),
    ),
    "window-close": Parts(
        *(_WINDOW_THING, "reach for the handle", "slide the window shut"),
        box=((-0.02, 0.06), (-0.06, 0.02), (-_FAR, -0.07)),
        moved=(-_FAR, 0.08),
    ),
    _PRESS: Parts(
        *(_BUTTON_THING, "reach for the button", "press the button down"),
        box=((-0.05, 0.05), (-0.05, 0.05), (-_FAR, 0.075)),
        moved=(-_FAR, -0.01),
    ),
}

TASKS = {name: MetaworldTask(name, f"{name}-v3", prompt) for name, prompt in _PROMPTS.items()}
TASKS[_PRESS] = dataclasses.replace(TASKS[_PRESS], parts=_PARTS[_PRESS])
for _start, *_names in (
    (_DRAWER, "drawer-open", "drawer-close"),
    (_WINDOW, "window-open", "window-close"),
):
    for _name, _opposite in (_names, reversed(_names)):
        TASKS[f"{_name}-halfway"] = MetaworldTask(
            *(f"{_name}-halfway", f"{_name}-v3", _PROMPTS[_name], _HALFWAY_MAX_STEPS),
            start=_start,
            opposite_prompt=_PROMPTS[_opposite],
            parts=_PARTS[_name],
        )

# Names for several tasks at once.
MIXTURES = {
    "tiny": (
        *("drawer-open-halfway", "drawer-close-halfway"),
        *("window-open-halfway", "window-close-halfway"),
        _PRESS,
    ),
}

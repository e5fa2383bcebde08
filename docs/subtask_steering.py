"""Make the picture of docs/recipe.md: the same moment, and what a given subtask makes of it.

    python docs/subtask_steering.py CHECKPOINT docs/steering.webp [ROBOT]

The policy gets the same observation and noise, once without a subtask and once with each that
belongs to later parts of the task. Each chunk is executed from the same start, and the last moment
is drawn.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from piston.inference.loading import load_policy
from piston.sim import make_environment, make_expert

TASK, SEED, STEPS = "aloha_transfer_cube", 0, 96
SIDE, TITLE = 240, 34


def main(checkpoint: str, picture: Path, robot: str | None = None) -> None:
    policy = load_policy(checkpoint, robot=robot)
    environment, expert = make_environment(TASK), make_expert(TASK)
    environment.reset(SEED)
    expert.start(environment)
    subtasks = []
    while (step := expert.act()) is not None:
        subtasks.append(step.subtask)
    observation = {**environment.observe(), "prompt": environment.prompt}
    tiles = [tile(environment.render(SIDE, SIDE), "the start")]
    for given in (None, *dict.fromkeys(subtasks[STEPS:])):
        request = observation if given is None else {**observation, "subtask": given}
        answer = policy.infer(request, seed=0)
        title = f"own: {answer['subtask']}" if given is None else f"given: {given}"
        environment.reset(SEED)
        for action in answer["actions"][:STEPS]:
            environment.step(action)
        tiles.append(tile(environment.render(SIDE, SIDE), title))
    columns = 3
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * SIDE, rows * (SIDE + TITLE)), "white")
    for number, one in enumerate(tiles):
        row, column = divmod(number, columns)
        sheet.paste(one, (column * SIDE, row * (SIDE + TITLE)))
    sheet.save(picture, quality=80)


def tile(pixels: np.ndarray, title: str) -> Image.Image:
    one = Image.new("RGB", (SIDE, SIDE + TITLE), "white")
    one.paste(Image.fromarray(pixels), (0, TITLE))
    ImageDraw.Draw(one).text((6, 9), title, fill="black", font_size=15)
    return one


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

"""`piston train PRESET --exp-name NAME [overrides]`: from a data set to a servable checkpoint."""

from __future__ import annotations

import sys

from piston import presets
from piston.cli.screen import fail
from piston.logs import init_logging
from piston.training.loop import TrainingStopped, train_loop


def run(args: list[str]) -> int:
    init_logging()
    config = presets.cli(args, prog="piston train")
    try:
        checkpoint = train_loop(config)
    except TrainingStopped as stopped:
        return fail(str(stopped), code=1)
    print(f"Done. Serve it with: piston serve {checkpoint}", file=sys.stderr)
    return 0

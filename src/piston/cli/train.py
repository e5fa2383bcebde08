"""`piston train PRESET --exp-name NAME [overrides]`: from a data set to a servable checkpoint.

Ends with 0 after the last step; with 130 or 143 when Ctrl-C or SIGTERM stopped it, everything
saved; with 1 after an error.
"""

from __future__ import annotations

import logging
import os
import sys

from piston import presets
from piston.cli.screen import fail
from piston.training.loop import TrainingStopped, train_loop


def run(args: list[str]) -> int:
    is_first = int(os.environ.get("RANK", 0)) == 0
    if not is_first:  # what all processes of torchrun would say, the first one says
        logging.getLogger().setLevel(logging.WARNING)
    config = presets.cli(args, prog="piston train")
    try:
        checkpoint = train_loop(config)
    except TrainingStopped as stopped:
        return fail(str(stopped), code=stopped.exit_code)
    if is_first:
        print(f"Done. Serve it with: piston serve {checkpoint}", file=sys.stderr)
    return 0

"""`piston train PRESET --exp-name NAME [overrides]`: from a data set to a servable checkpoint.

Ends with 0 after the last step; with 130 or 143 when Ctrl-C or SIGTERM stopped it, everything
saved; with 1 after an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Sequence

import tyro

from piston import presets
from piston.cli.console import fail
from piston.config import TrainConfig
from piston.optimization import CosineDecaySchedule, LRSchedule, RsqrtDecaySchedule
from piston.training.loop import TrainingStopped, train_loop

PROG = "piston train"
SCHEDULES: dict[str, type[LRSchedule]] = {
    "cosine": CosineDecaySchedule,
    "rsqrt": RsqrtDecaySchedule,
}


def run(args: list[str]) -> int:
    is_first = int(os.environ.get("RANK", 0)) == 0
    if not is_first:  # what all processes of torchrun would say, the first one says
        logging.getLogger().setLevel(logging.WARNING)
    config = parse(args)
    try:
        checkpoint = train_loop(config)
    except TrainingStopped as stopped:
        return fail(str(stopped), code=stopped.exit_code)
    if is_first:
        served = shlex.quote(str(checkpoint))
        print(f"Done. Serve it with: piston serve {served}", file=sys.stderr)
    return 0


def parse(args: Sequence[str]) -> TrainConfig:
    """--resume wins over a preset that overwrites; over --overwrite beside it nothing does."""
    words = list(args)
    if "--resume" in words and "--overwrite" not in words:
        words.insert(1, "--no-overwrite")
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--lr-schedule", choices=SCHEDULES)
    own, rest = parser.parse_known_args(words)
    if own.lr_schedule is None:
        return presets.cli(words, prog=PROG)
    preset = _with_schedule(presets.get(rest[0]), SCHEDULES[own.lr_schedule])
    choices = {preset.name: (f"with the {own.lr_schedule} schedule", preset)}
    return tyro.extras.overridable_config_cli(choices, prog=PROG, args=rest)


def _with_schedule(preset: TrainConfig, kind: type[LRSchedule]) -> TrainConfig:
    """The options --lr-schedule.… are those of the kind; warm-up and peak stay the preset's."""
    before = preset.lr_schedule
    if isinstance(before, kind):
        return preset
    schedule = kind(warmup_steps=before.warmup_steps, peak_lr=before.peak_lr)
    return dataclasses.replace(preset, lr_schedule=schedule)

"""Samples that misbehave, in a module that worker processes can import."""

import os
import signal
import time

import numpy as np


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Numbers:
    """Sample i holds i in several shapes and types; at `bad`, `trouble` happens."""

    def __init__(self, length=20, bad=None, trouble=None):
        self.length, self.bad, self.trouble = length, bad, trouble

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            getattr(self, f"_{self.trouble}")(index)
        return {
            "image": {"top": np.full((4, 4, 3), index % 256, np.uint8)},
            "image_mask": {"top": np.True_},
            "state": np.full(3, index, np.float32),
            "index": np.int64(index),
            "process": np.int64(os.getpid()),
        }

    def _raise(self, index):
        error = KeyError(f"sample {index} is bad")
        error.add_note("in episode 7")
        raise error

    def _raise_unpicklable(self, index):
        raise UnpicklableError("one", index)

    def _die(self, index):  # noqa: ARG002
        os.kill(os.getpid(), signal.SIGKILL)

    def _exit(self, index):  # noqa: ARG002
        os._exit(3)

    def _sleep(self, index):  # noqa: ARG002
        time.sleep(600)

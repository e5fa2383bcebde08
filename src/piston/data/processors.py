"""How many processors there are to work with."""

from __future__ import annotations

import os


def num_usable_cpus() -> int:
    """Those that this process may run on: in a container or a job, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

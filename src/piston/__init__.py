"""Piston: vision-language-action flow models, from a LeRobot data set to a moving robot.

    policy = piston.load_policy("checkpoints/pi0_aloha_sim/first/19999")
    actions = policy.infer(observation)["actions"]

Importing this package loads nothing heavy. A robot needs only the distribution `piston-client`.
"""

from __future__ import annotations

import sys

from piston.moved import OldNames

TYPE_CHECKING = False  # as in typing, whose import would take longer than everything else here
if TYPE_CHECKING:
    from piston.inference import load_policy

__version__ = "0.2.0.dev0"
__all__ = ["__version__", "load_policy"]

sys.meta_path.insert(0, OldNames())


def __getattr__(name: str) -> object:
    if name == "load_policy":
        from piston.extras import needed_for

        with needed_for("piston.load_policy"):
            from piston.inference import load_policy

        return load_policy
    raise AttributeError(f"module 'piston' has no attribute {name!r}")

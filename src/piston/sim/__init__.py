"""Simulated robots: environments, scripted experts, and recordings of them.

Files hand on in this order: `opengl` → `rendering` (pictures) → `environment` (the interface) →
`aloha`, `metaworld` (robots and their experts) → `catalog` (by name) → `recording` (data sets).
MuJoCo is imported when the first environment is made, not before.
"""

from piston.sim.catalog import environment_names, make_environment, make_expert
from piston.sim.environment import (
    RECORDING_SEEDS,
    Demonstration,
    Environment,
    Expert,
    Observation,
    StepResult,
    check_evaluation_seeds,
)

__all__ = [
    "RECORDING_SEEDS",
    "Demonstration",
    "Environment",
    "Expert",
    "Observation",
    "StepResult",
    "check_evaluation_seeds",
    "environment_names",
    "make_environment",
    "make_expert",
]

"""Inference: from a checkpoint to actions. Never imports training."""

from piston.inference.loading import load_policies, load_policy
from piston.inference.policy import Policy
from piston.inference.robots import RobotPolicies

__all__ = ["Policy", "RobotPolicies", "load_policies", "load_policy"]

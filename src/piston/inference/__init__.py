"""Inference: from a checkpoint to actions. Never imports training."""

from piston.inference.loading import load_policies, load_policy
from piston.inference.policy import Policy

# The former class: a policy of several robots is made in the same way.
RobotPolicies = Policy.join

__all__ = ["Policy", "RobotPolicies", "load_policies", "load_policy"]

"""Inference: from a checkpoint to actions. Never imports training."""

from piston.inference.loading import load_policy
from piston.inference.policy import Policy

__all__ = ["Policy", "load_policy"]

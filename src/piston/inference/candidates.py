"""Several chunks for one observation: which one to execute, and how sure the policy is.

Candidates are denoised from different noise and share one prefix. Chosen is the one that agrees
most with the others: its distance to them is the smallest. Numbers are in the units of normalised
actions; dimensions that the robot does not have are left out.

Dims: k times of the integrator, n candidates, h horizon, a action dim.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def choose_candidate(chunks: Float[Tensor, "n h a"]) -> int:
    """Return the candidate with the smallest sum of distances to the others."""
    flat = chunks.flatten(1)
    distances = (flat[:, None] - flat[None]).square().mean(-1).sqrt()
    return int(distances.sum(1).argmin())


def uncertainty(path: Float[Tensor, "k n h a"]) -> dict[str, float]:
    """Return signs of a chunk that may fail, from the path of every candidate.

    `spread` is the standard deviation over candidates, averaged over all numbers of the chunk; for
    at least two candidates. `accel` is how much the velocity changes from step to step of the
    integrator, relative to the velocity, averaged over candidates; for at least two steps.
    """
    found = {}
    if path.shape[1] > 1:
        found["spread"] = float(path[-1].std(0).mean())
    velocity = path.diff(dim=0).flatten(2)
    if len(velocity) > 1:
        change = velocity.diff(dim=0).norm(dim=-1).sum(0)
        found["accel"] = float((change / velocity.norm(dim=-1).sum(0).clamp(min=1e-12)).mean())
    return found

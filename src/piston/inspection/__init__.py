"""How observations influence actions: interventions on a policy, answered with numbers.

policy = load_policy("checkpoints/…/1499")
frames = Frames.open(policy, "data/my_set")
probe = Probe(policy)
chunks = probe.chunks(frames[0, 25], [Intervention(), Intervention(off=("base_0_rgb",))])
"""

from piston.inspection.frames import Frame, Frames
from piston.inspection.probe import Box, Intervention, Probe

__all__ = ["Box", "Frame", "Frames", "Intervention", "Probe"]

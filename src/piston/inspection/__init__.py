"""How observations influence actions: interventions on a policy, answered with numbers.

policy = load_policy("checkpoints/…/1499")
frames = Frames.open(policy, "data/my_set")
probe = Probe(policy)
chunks = probe.chunks(frames[0, 25], [Intervention(), Intervention(off=("base_0_rgb",))])
found = influence(probe, frames, frames.spread_out(10))
verdicts = influence_verdicts(found)
where = Occlusion(probe, frames, actions=["left_waist"]).map(frames[0, 25], "base_0_rgb")
overview = compute(policy, frames)  # all of it, as `piston inspect` does
along = open_loop(probe, frames, episode=3)
"""

from piston.inspection.frames import Frame, Frames
from piston.inspection.influence import Influence, influence
from piston.inspection.inside import Inside, inside
from piston.inspection.occlusion import Occlusion, OcclusionMap
from piston.inspection.open_loop import OpenLoop, open_loop
from piston.inspection.overview import Overview, Plan, compute
from piston.inspection.probe import Box, Intervention, Probe
from piston.inspection.results import Verdict, as_json
from piston.inspection.verdicts import influence_verdicts, open_loop_verdicts

__all__ = [
    "Box",
    "Frame",
    "Frames",
    "Influence",
    "Inside",
    "Intervention",
    "Occlusion",
    "OcclusionMap",
    "OpenLoop",
    "Overview",
    "Plan",
    "Probe",
    "Verdict",
    "as_json",
    "compute",
    "influence",
    "influence_verdicts",
    "inside",
    "open_loop",
    "open_loop_verdicts",
]

"""The overview of all kinds of models."""

import json

import numpy as np
import pytest

from piston.inspection import Frames, Plan, as_json, compute
from piston.report.inspection import inspection_page

from . import untrained


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return untrained.record(tmp_path_factory.mktemp("overview") / "data")


@pytest.mark.parametrize("kind", ["pi0", "fast"])
def test_all_parts_are_computed_and_shown(kind, data):
    policy = untrained.policy(kind)
    seen = []
    is_fast = kind == "fast"
    # To name its tokens, π0-FAST would need the tokenizer's files.
    plan = Plan(frames=2, seeds=2, maps=1, map_budget=66, inside=not is_fast)
    found = compute(
        policy,
        Frames.open(policy, data),
        plan=plan,
        progress=lambda done, total=None, note="": seen.append((done, total, note)),
    )
    assert len(found.moments) == 2
    # A map for each camera that the robot has, and no map of the empty slot.
    assert [one.camera for one in found.moments[0].maps] == ["base_0_rgb", "left_wrist_0_rgb"]
    assert found.moments[0].predicted.shape == found.moments[0].recorded.shape
    assert (found.influence.strength_in_spreads is None) == is_fast
    assert found.moments[0].spread.any() != is_fast
    # One count that never goes back.
    done, totals = np.array([one[:2] for one in seen]).T
    assert (np.diff(done) >= 0).all()
    assert set(totals) == {done[-1]}
    numbers = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert list(numbers) == [
        *("about", "verdicts", "moments", "influence", "open_loop", "inside", "live"),
    ]
    page = inspection_page(found)
    for text in ("front: black picture", "Where it looks", "Along an episode"):
        assert text in page


def test_a_short_plan_leaves_parts_out(data):
    policy = untrained.policy("pi0")
    plan = Plan(frames=1, seeds=2, maps=0, episodes=0, inside=False)
    found = compute(policy, Frames.open(policy, data), plan=plan, places=[(1, 2)])
    assert [(one.episode, one.frame, one.maps) for one in found.moments] == [(1, 2, ())]
    assert found.open_loop == ()
    assert found.inside is None
    assert "Where it looks" not in inspection_page(found)

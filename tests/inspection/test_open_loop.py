"""Open loop: chunks with known faults are measured as such, and verdicts name the fault."""

import dataclasses
import json

import numpy as np
import pytest

from piston.inspection.frames import Frames
from piston.inspection.open_loop import compare_chunks, open_loop
from piston.inspection.probe import Probe
from piston.inspection.results import as_json
from piston.inspection.verdicts import LARGE_ERROR, NOTABLE_ERROR, open_loop_verdicts

from . import untrained

LENGTHS, HORIZON, EXECUTE, SEEDS = (20, 13), 4, 3, 4
SHOULDER, ELBOW, GRIPPER = range(3)


def actions(episode):
    """The shoulder swings, the elbow never moves, the gripper opens and closes."""
    time = np.arange(LENGTHS[episode]) / 5 + episode
    return np.stack([np.sin(time), 0 * time, time % 2 > 1], axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def policy():
    return untrained.policy("pi0")


@pytest.fixture(scope="module")
def frames(policy, tmp_path_factory):
    recorded = [("swing", 0.9 * actions(episode), actions(episode)) for episode in range(2)]
    folder = untrained.write(tmp_path_factory.mktemp("open_loop") / "data", recorded)
    return Frames.open(policy, folder)


def compared(frames, *faults, episode=0, stride=1):
    """Compare what was recorded, with faults: functions of the chunks and the asked frames."""
    places = range(0, LENGTHS[episode], stride)
    moments = [frames[episode, place] for place in places]
    recorded = np.stack([moment.recorded for moment in moments])[:, None]
    chunks = recorded.repeat(SEEDS, 1).astype(np.float64)
    for fault in faults:
        chunks = fault(chunks, np.array(places))
    return compare_chunks(frames, moments, chunks, EXECUTE)


def verdicts(*results):
    return {one.kind: one for one in open_loop_verdicts(results)}


def test_the_recording_itself_has_no_error_and_no_verdict(frames):
    result = compared(frames)
    assert not result.error.any()
    assert not result.seed_spread.any()
    assert result.asked == tuple(range(20))
    # The recorded steps themselves are the changes at the seams.
    steps = np.diff(actions(0), axis=0)
    np.testing.assert_allclose(result.jumps[:, 0], steps[EXECUTE - 1 :], atol=1e-6)
    assert np.nanmax(result.jump_ratios) == pytest.approx(1)
    assert not verdicts(result)


def test_errors_are_counted_where_something_was_recorded(frames):
    def wrong_from_the_fourth_step_on(chunks, _):
        chunks[:, :, 3:, SHOULDER] += 0.2
        chunks[:, 1, :, GRIPPER] += 0.4
        return chunks

    def wild_past_the_end(chunks, places):
        steps = places[:, None] + np.arange(HORIZON)
        chunks[np.where(steps >= LENGTHS[0])[0], :, np.where(steps >= LENGTHS[0])[1]] = 1e6
        return chunks

    result = compared(frames, wrong_from_the_fourth_step_on, wild_past_the_end)
    np.testing.assert_allclose(result.error[:, SHOULDER], [0, 0, 0, 0.2], atol=1e-6)
    np.testing.assert_allclose(result.error[:, GRIPPER], 0.4 / SEEDS, rtol=1e-5)
    spread = np.std([0.4, 0, 0, 0], ddof=1)
    np.testing.assert_allclose(result.seed_spread[:, GRIPPER], spread, rtol=1e-5)
    whole = np.concatenate([actions(0), actions(1)])
    np.testing.assert_allclose(result.std[[0, 2]], whole.std(0)[[0, 2]], rtol=1e-5)
    assert np.isnan(result.std[ELBOW]), "it never moves: there is no unit for its errors"
    written = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert written["std"][ELBOW] is None
    assert "chunks" not in written, "hundreds of thousands of numbers"


def test_standing_still_is_as_wrong_as_standing_still(frames):
    result = compared(frames, lambda chunks, _: chunks[:, :, :1].repeat(HORIZON, 2))
    np.testing.assert_allclose(result.error, result.error_of_standing, rtol=1e-5)
    assert verdicts(result)["no-better-than-standing"].number == pytest.approx(1)


def test_the_worst_moment_is_found_first_and_named(frames):
    def wrong_once(chunks, places):
        chunks[..., GRIPPER] += 0.3
        chunks[places == 7, :, :EXECUTE, GRIPPER] += 2.0
        chunks[places == 11, 0, :EXECUTE, SHOULDER] += 6.0
        return chunks

    result = compared(frames, wrong_once)
    first, second = result.worst[:2]
    assert (first.episode, first.frame, first.dimension) == (0, 7, "gripper")
    assert first.error == pytest.approx(2.3, rel=1e-5)
    assert first.error_std == pytest.approx(2.3 / result.std[GRIPPER], rel=1e-5)
    assert first.seed_spread_std == pytest.approx(0, abs=1e-6)
    assert (second.frame, second.dimension) == (11, "shoulder")
    spread = np.std([6, 0, 0, 0], ddof=1) / result.std[SHOULDER]
    assert second.seed_spread_std == pytest.approx(spread, rel=1e-5)


def test_a_large_error_is_a_problem_of_its_dimension(frames):
    def agreed(chunks, _):
        chunks[..., GRIPPER] += 0.8
        return chunks

    def unsure(chunks, _):
        chunks[..., GRIPPER] += np.array([0.9, -0.9, 0.9, -0.9])[:, None]
        return chunks

    for fault, words in (
        (agreed, "agree on a wrong motion"),
        (unsure, "it is not sure what to do"),
    ):
        verdict = verdicts(compared(frames, fault))["open-loop-error"]
        assert (verdict.subject, verdict.severity) == ("gripper", "problem")
        assert verdict.number > verdict.threshold
        assert words in verdict.sentence
        assert "worst at episode 0, frame" in verdict.sentence
        together = verdicts(compared(frames, fault), compared(frames))["open-loop-error"]
        assert together.number == pytest.approx(verdict.number / 2)


def test_a_smaller_error_is_remarked(frames):
    def slightly(chunks, _):
        chunks[..., GRIPPER] += 0.08
        return chunks

    result = compared(frames, slightly)
    verdict = verdicts(result)["open-loop-error"]
    assert (verdict.severity, verdict.threshold) == ("remark", NOTABLE_ERROR)
    assert NOTABLE_ERROR < verdict.number < LARGE_ERROR
    alone = dataclasses.replace(result, chunks=result.chunks[:, :1])
    assert "seeds" not in verdicts(alone)["open-loop-error"].sentence


def test_an_error_that_grows_is_remarked(frames):
    def grows(chunks, _):
        chunks[..., SHOULDER] += np.linspace(0.01, 0.6, HORIZON)
        return chunks

    verdict = verdicts(compared(frames, grows))["error-grows"]
    assert verdict.severity == "remark"
    assert verdict.number > verdict.threshold


def test_chunks_that_disagree_jump_at_the_seams(frames):
    def late(chunks, places):
        # Every other question is answered a little higher.
        chunks[..., SHOULDER] += 0.25 * (places // EXECUTE % 2)[:, None, None]
        return chunks

    result = compared(frames, late)
    verdict = verdicts(result)["seam-jump"]
    assert verdict.subject == "shoulder"
    ratios = np.abs(result.jumps[..., SHOULDER]) / result.largest_step[SHOULDER]
    assert verdict.number == pytest.approx(np.median(ratios))
    step = np.abs(np.diff(actions(0)[:, SHOULDER])).max()
    whole = max(step, np.abs(np.diff(actions(1)[:, SHOULDER])).max())
    assert result.largest_step[SHOULDER] == pytest.approx(whole)


def test_seams_join_answers_to_different_noise(frames):
    def by_seed(chunks, _):
        return chunks * 0 + np.arange(SEEDS)[:, None, None]

    jumps = compared(frames, by_seed).jumps
    assert (np.abs(jumps) >= 1).all(), "on a robot no two requests have the same noise"


def test_the_policy_is_asked_where_a_chunk_would_take_over(policy, frames):
    probe = Probe(policy, range(2))
    result = open_loop(probe, frames, 0, execute_horizon=3, stride=5)
    assert result.asked == (0, 3, 5, 8, 10, 13, 15, 18)
    assert result.seams == (3, 8, 13, 18)
    for place, chunk in zip(result.asked, result.chunks):
        for noise, one in zip(probe.noise, chunk):
            answer = policy.infer(frames[0, place].observation, noise=noise)["actions"]
            np.testing.assert_allclose(one, answer, atol=1e-4)
    before, after = (result.chunks[result.asked.index(place)] for place in (5, 8))
    np.testing.assert_array_equal(result.jumps[1], after[::-1, 0] - before[:, 2])


def test_every_chunk_is_followed_by_the_next_one(policy, frames):
    asked = open_loop(Probe(policy, [0]), frames, 1, execute_horizon=3, stride=2).asked
    assert asked == (0, 2, 3, 5, 6, 8, 9, 11, 12)


def test_wrong_requests_are_refused(policy, frames):
    probe = Probe(policy, [0])
    with pytest.raises(ValueError, match="execute_horizon is 7; a chunk has 1 to 4"):
        open_loop(probe, frames, 0, execute_horizon=7)
    with pytest.raises(ValueError, match="stride is 0"):
        open_loop(probe, frames, 0, stride=0)
    with pytest.raises(LookupError, match="no episode 9"):
        open_loop(probe, frames, 9)
    with pytest.raises(ValueError, match="cannot be compared"):
        frames[0, 0].error(np.zeros((2, HORIZON, 4)))

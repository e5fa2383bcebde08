"""Occlusion maps: where covering changes the actions."""

import av
import numpy as np
import pytest
import torch

from piston.inspection import Box, Frames, Intervention, Probe
from piston.inspection.occlusion import Occlusion, overlay_map

from . import untrained
from .untrained import BASE_SLOT, IMAGE_SIZE, WRIST_SLOT

BUDGET = 90
# What the model below sees of a picture: rows and columns.
SEEN = (slice(0, 8), slice(8, 16))


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    folder = untrained.record(tmp_path_factory.mktemp("set") / "set")
    return Frames.open(untrained.policy("pi0"), folder)


@pytest.fixture(scope="module")
def probe():
    """Of a model that sees one quarter of every picture."""
    policy = untrained.policy("pi0")

    def blind(_, inputs):
        images, *others = inputs
        shown = torch.zeros_like(images)
        shown[:, *SEEN] = images[:, *SEEN]
        return (shown, *others)

    policy.model.vision.register_forward_pre_hook(blind)
    return Probe(policy, range(2))


def test_only_the_part_that_the_model_sees_has_an_effect(probe, frames):
    found = Occlusion(probe, frames, budget=BUDGET).map(frames[0, 1], BASE_SLOT)
    values = found.pixels(IMAGE_SIZE, IMAGE_SIZE)
    # Half a cell of two pixels around a cell is covered too, so that the next cells have some.
    outside = np.ones_like(values, bool)
    outside[:10, 6:] = False
    # Some CPUs round a row differently in batches of other sizes.
    assert values[outside].max() <= 1e-6 * values.max()
    assert values[SEEN].min() > 1e-3 * values.max()
    assert values.max() == found.value.max() == values[found.strongest.pixels(16, 16)].max()


def test_cells_fill_the_picture_and_share_out_what_the_grid_has(probe, frames):
    occlusion = Occlusion(probe, frames, budget=BUDGET)
    found = occlusion.map(frames[0, 1], BASE_SLOT)
    areas = np.array([(c.right - c.left) * (c.bottom - c.top) for c in found.cells])
    assert areas.sum() == pytest.approx(1.0)
    assert len(np.unique(areas)) > 1
    grid = Occlusion(probe, frames, budget=65).map(frames[0, 1], BASE_SLOT)
    assert len(grid.cells) == 64
    assert (areas * found.value).sum() == pytest.approx(grid.value.mean())
    assert np.array_equal(grid.value, grid.effect)
    # The four parts of a cell have values in the ratios of their effects.
    parts: dict[tuple[int, int], list[int]] = {}
    for number in np.flatnonzero(areas < areas.max()):
        cell = found.cells[number]
        parts.setdefault((int(8 * cell.left), int(8 * cell.top)), []).append(number)
    for four in parts.values():
        effect, value = found.effect[four], found.value[four]
        assert len(four) == 4
        np.testing.assert_allclose(value * effect.sum(), effect * value.sum(), rtol=1e-6)


def test_an_effect_is_that_of_covering_the_cell_and_half_of_one_around_it(probe, frames):
    occlusion = Occlusion(probe, frames, actions=["elbow"], steps=(1, 3), budget=BUDGET)
    frame = frames[0, 1]
    found = occlusion.map(frame, BASE_SLOT)
    picture = occlusion.picture(frame, BASE_SLOT)
    cell = found.cells.index(Box(BASE_SLOT, 0.5, 0.125, 0.625, 0.25))  # of the first grid
    covered = picture.copy()
    covered[1:5, 7:11] = occlusion.background(BASE_SLOT)[1:5, 7:11]
    unchanged, changed = probe.chunks(
        frame, [Intervention(), Intervention(shown={BASE_SLOT: covered})]
    )
    change = (changed - unchanged)[:, 1:3, 1] / frames.action_scale()[1]
    assert found.effect[cell] == pytest.approx(np.sqrt(np.square(change).mean()), rel=1e-4)
    assert (found.actions, found.steps) == (("elbow",), (1, 3))


def test_the_budget_holds_and_two_runs_give_equal_numbers(probe, frames):
    occlusion = Occlusion(probe, frames, budget=BUDGET)
    before, reports = probe.num_chunks, []
    once = occlusion.map(
        frames[1, 2], WRIST_SLOT, progress=lambda done, total: reports.append((done, total))
    )
    assert probe.num_chunks - before == reports[-1][0]
    assert BUDGET - 4 < reports[-1][0] <= BUDGET == reports[-1][1]
    assert once.num_inferences == 2 * reports[-1][0]
    again = occlusion.map(frames[1, 2], WRIST_SLOT)
    assert once.cells == again.cells
    assert np.array_equal(once.value, again.value)


def test_the_background_is_the_median_picture(probe, frames):
    occlusion = Occlusion(probe, frames)
    pictures = [
        occlusion.picture(frames[episode, number], BASE_SLOT)
        for episode, length in frames.episodes.items()
        for number in range(length)
    ]
    found = occlusion.background(BASE_SLOT).astype(float)
    # Of most of the frames: `spread_out` chooses some of them twice.
    assert np.abs(found - np.median(pictures, axis=0)).mean() < 30
    assert np.abs(found - pictures[0]).mean() > 50


def test_a_film_shows_every_map_at_the_episodes_pace(probe, frames, tmp_path):
    occlusion = Occlusion(probe, frames, budget=65)
    maps = occlusion.film(0, BASE_SLOT, tmp_path / "film.mp4", stride=2)
    assert len(maps) == untrained.EPISODE // 2
    with av.open(str(tmp_path / "film.mp4")) as film:
        stream = film.streams.video[0]
        assert stream.average_rate == untrained.FPS / 2
        pictures = [frame.to_ndarray(format="rgb24") for frame in film.decode(stream)]
    assert len(pictures) == len(maps)
    largest = max(one.value.max() for one in maps)
    for number, (shown, one) in enumerate(zip(pictures, maps, strict=True)):
        seen = occlusion.picture(frames[0, 2 * number], BASE_SLOT)
        expected = overlay_map(seen, one, largest).astype(float)
        assert np.abs(shown - expected).mean() < 12  # compressed


def test_what_is_not_there_is_named(probe, frames):
    with pytest.raises(LookupError, match="no action 'knee'; there is shoulder, elbow, gripper"):
        Occlusion(probe, frames, actions=["knee"])
    with pytest.raises(ValueError, match="budget is 40; the first grid alone needs 65"):
        Occlusion(probe, frames, budget=40)
    with pytest.raises(ValueError, match=r"steps are \(3, 9\); a chunk has 4"):
        Occlusion(probe, frames, steps=(3, 9))
    for camera in ("top", untrained.EMPTY_SLOT):
        with pytest.raises(LookupError, match=f"no camera '{camera}'; there is base_0_rgb"):
            Occlusion(probe, frames).map(frames[0, 0], camera)
    with pytest.raises(ValueError, match="No action moves"):
        Occlusion(probe, frames, actions=["gripper"]).map(frames[0, 0], BASE_SLOT)

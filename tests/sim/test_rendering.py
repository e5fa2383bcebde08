"""Pictures: what may be left out changes nothing, what must be left out is never there."""

import copy
import threading

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")

from piston.sim import make_environment, make_expert, rendering


@pytest.fixture(scope="module")
def at_work():
    """An ALOHA environment with both arms in the picture."""
    environment, expert = (make("aloha_transfer_cube") for make in (make_environment, make_expert))
    environment.reset(seed=0)
    expert.start(environment)
    for _ in range(130):
        environment.step(expert.act().executed)
    return environment


@pytest.mark.parametrize("camera", ["top", "angle", "front_close", "left_pillar", "right_pillar"])
@pytest.mark.parametrize("field_of_view", [8.0, 20.0, 44.0, 78.0])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 48), (48, 16)])
def test_leaving_out_what_is_out_of_sight_changes_no_pixel(
    at_work, camera, field_of_view, height, width, monkeypatch
):
    view = rendering.View(camera, field_of_view)
    drawn = at_work._render(view, height, width)
    monkeypatch.setattr(rendering, "_out_of_sight", lambda model, *_: np.zeros(model.ngeom, bool))
    np.testing.assert_array_equal(at_work._render(view, height, width), drawn)


def test_a_narrow_view_leaves_most_things_out(at_work):
    _, model, data = at_work._current()
    camera = model.camera("top").id
    with rendering._camera_set_up(model, data, camera, 8.0, aspect=1.0):
        assert (model.geom_group == rendering._UNDRAWN_GROUP).sum() > model.ngeom / 2


def test_drawing_leaves_the_model_as_it_was(at_work):
    model = at_work._current().model
    before = model.cam_fovy.copy(), model.geom_group.copy()
    at_work.observe()
    np.testing.assert_array_equal(model.cam_fovy, before[0])
    np.testing.assert_array_equal(model.geom_group, before[1])


def test_any_thread_may_draw(at_work):
    here, there = at_work.render(48, 64), []
    thread = threading.Thread(target=lambda: there.append(at_work.render(48, 64)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(there[0], here)


def test_larger_pictures_than_before_are_whole(at_work):
    large = at_work.render(500, 700, "angle")
    assert large.shape == (500, 700, 3)
    small = at_work.render(125, 175, "angle")
    averaged = large.reshape(125, 4, 175, 4, 3).mean(axis=(1, 3))
    assert np.abs(averaged - small).mean() < 3


def test_an_unknown_camera_is_named(at_work):
    with pytest.raises(ValueError, match="No camera is named 'bottom'.*top"):
        at_work.render(camera="bottom")


def test_a_picture_needs_pixels(at_work):
    with pytest.raises(ValueError, match="0×64"):
        at_work.render(0, 64)


@pytest.mark.parametrize("name", ["aloha_transfer_cube", "metaworld:drawer-open-halfway"])
def test_simplified_meshes_look_the_same(name, monkeypatch):
    """Fewer triangles, hardly another picture; the simulated model is untouched."""
    environment = make_environment(name)
    environment.reset(3)
    _, model, _ = environment._current()
    faces, corners = model.mesh_face.copy(), model.mesh_facenum.copy()
    drawn = rendering._simplified(model)
    assert drawn.mesh_facenum.sum() < 0.8 * corners.sum()
    assert (drawn.mesh_facenum[corners > 0] > 0).all()
    fast = environment.render(240, 320)
    monkeypatch.setattr(rendering, "_simplified", copy.copy)
    monkeypatch.setattr(rendering, "_canvases", {})
    exact = environment.render(240, 320)
    assert 0 < np.abs(fast.astype(int) - exact).mean() < 0.2
    np.testing.assert_array_equal(model.mesh_face, faces)
    np.testing.assert_array_equal(model.mesh_facenum, corners)

"""Which OpenGL is chosen, without needing any."""

import pytest

from piston.sim import rendering as opengl


@pytest.fixture
def machine(monkeypatch):
    """A Linux machine on which only the named libraries work."""

    def make(*working: str, platform: str = "linux"):
        monkeypatch.delenv(opengl.VARIABLE, raising=False)
        monkeypatch.setattr(opengl.sys, "platform", platform)
        monkeypatch.setattr(opengl, "egl_works", lambda: "egl" in working)
        monkeypatch.setattr(opengl, "osmesa_works", lambda: "osmesa" in working)

    yield make
    # Whatever a test has set is gone before the next one draws.
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("working", "chosen"),
    [(("egl", "osmesa"), "egl"), (("egl",), "egl"), (("osmesa",), "osmesa")],
)
def test_egl_is_preferred_and_told_to_mujoco(machine, working, chosen):
    machine(*working)
    assert opengl.choose_opengl() == chosen
    assert opengl.os.environ[opengl.VARIABLE] == chosen


def test_what_the_user_set_stands(machine, monkeypatch):
    machine("egl", "osmesa")
    monkeypatch.setenv(opengl.VARIABLE, "osmesa")
    assert opengl.choose_opengl() == "osmesa"


def test_a_choice_of_the_user_that_does_not_work_is_an_error_that_names_it(machine, monkeypatch):
    machine("egl")
    monkeypatch.setenv(opengl.VARIABLE, "osmesa")
    with pytest.raises(opengl.RenderingUnavailable, match=r"MUJOCO_GL=osmesa is set.*apt install"):
        opengl.choose_opengl()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_nothing_is_chosen_where_mujoco_needs_no_choice(machine, platform):
    machine(platform=platform)
    assert opengl.choose_opengl() is None
    assert opengl.VARIABLE not in opengl.os.environ


def test_a_machine_without_any_is_told_what_to_install(machine):
    machine()
    packages = r"apt install libegl1 libgl1 .*libosmesa6.*dnf install mesa-libEGL mesa-libGL"
    with pytest.raises(opengl.RenderingUnavailable, match=packages):
        opengl.choose_opengl()


@pytest.mark.parametrize("works", [opengl.egl_works, opengl.osmesa_works])
def test_a_missing_library_is_no_error(works, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(opengl.ctypes, "CDLL", missing)
    assert works() is False


def test_egl_without_libgl_does_not_work(monkeypatch):
    """MuJoCo would fail when it is imported, with an AttributeError of PyOpenGL."""
    load = opengl.ctypes.CDLL

    def without_libgl(name):
        if name in opengl._OPENGL_LIBRARIES:
            raise OSError(f"{name}: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(opengl.ctypes, "CDLL", without_libgl)
    assert opengl.egl_works() is False

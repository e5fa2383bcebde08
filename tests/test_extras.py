"""Packages that are not installed: the client works without them, the rest names the extra."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from piston import extras
from piston.extras import _PACKAGES, missing_package, needed_for

# As in an environment with nothing but `pip install 'piston[client]'`.
BLOCKER = """
import importlib.machinery, sys

class Blocker:
    ALLOWED = {*sys.stdlib_module_names, "piston", "numpy", "msgpack", "websockets"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in cls.ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker)
"""


def _run(program):
    command = [sys.executable, "-c", BLOCKER + program]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_client_needs_three_packages():
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    names = [requirement.partition(">")[0] for requirement in project["dependencies"]]
    assert names == ["numpy", "msgpack", "websockets"]
    assert project["optional-dependencies"]["client"] == []
    assert set(_PACKAGES) == set(project["optional-dependencies"]) - {"client", "dev"}
    result = _run("import piston.client; piston.client.Client; print('works')")
    assert result.stdout == "works\n", result.stderr


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("import piston; piston.load_policy", "piston.load_policy needs"),
        ("from piston.cli import main; sys.exit(main(['presets']))", "error: This command needs"),
        ("from piston.cli import main; sys.exit(main(['train', '--help']))", "This command needs"),
    ],
)
def test_without_the_rest_the_extra_is_named(program, what):
    result = _run(program)
    assert result.returncode == 1
    assert what in result.stderr
    assert "-m pip install 'piston[full]'" in result.stderr
    if "main" in program:
        assert "Traceback" not in result.stderr


def test_the_list_of_verbs_needs_nothing():
    result = _run("from piston.cli import main; sys.exit(main(['--help']))")
    assert result.returncode == 0, result.stderr


def test_the_extra_of_a_package():
    with pytest.raises(ImportError, match=r"A case needs mujoco.*'piston\[sim\]'"):  # noqa: SIM117
        with needed_for("A case"):
            raise ModuleNotFoundError("", name="mujoco.viewer")
    with pytest.raises(ModuleNotFoundError, match="mine"):  # noqa: SIM117
        with needed_for("A case"):
            raise ModuleNotFoundError("mine", name="mine")


@pytest.mark.parametrize(
    ("package", "version", "advice"),
    [
        ("gym_aloha", (3, 12), "'piston[sim]'"),
        ("gym_aloha", (3, 13), "--no-deps gym-aloha==0.1.5"),
        ("dm_control", (3, 12), "'piston[sim]'"),
        (
            "dm_control",
            (3, 13),
            f"--no-deps dm-control=={extras._DM_CONTROL} absl-py dm-env lxml scipy",
        ),
        ("metaworld", (3, 13), "'piston[sim]'"),
        ("mujoco", (3, 14), "'piston[sim]'"),
    ],
)
def test_what_an_extra_does_not_bring_is_named(package, version, advice, monkeypatch):
    monkeypatch.setattr(extras, "sys", SimpleNamespace(version_info=version, executable="python"))
    message = str(missing_package("The simulator", package))
    assert message.startswith(f"The simulator needs {package}, which is not installed.")
    assert message.endswith(f"Run: python -m pip install {advice}")
    assert ("labmaze has no wheel" in message) == ("--no-deps" in advice)


def test_nothing_helps_on_a_python_that_metaworld_refuses(monkeypatch):
    monkeypatch.setattr(extras, "sys", SimpleNamespace(version_info=(3, 14), executable="python"))
    message = str(missing_package("The simulator", "metaworld"))
    assert message.endswith("metaworld 3.1.1 requires Python 3.13 or older.")
    assert "Run:" not in message


def test_commands_and_the_extra_name_the_same_versions():
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    constraints = (Path(__file__).parent.parent / "constraints.txt").read_text()
    for name, requirement in (
        ("gym_aloha", "gym-aloha==0.1.5"),
        ("metaworld", "metaworld==3.1.1"),
    ):
        major, minor = extras._GAPS[name][0]
        assert f"{requirement}; python_version < '{major}.{minor}'" in pyproject
    assert f"dm_control=={extras._DM_CONTROL};" in constraints

"""Packages that are not installed: the client works without them, the rest says what to install.

Also what the two distributions, piston and piston-client, require.
"""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import piston
import piston_client
from piston import extras
from piston.extras import _PACKAGES, missing_package, needed_for, require_compiler

# As in an environment with nothing but `pip install piston-client` and Piston's source.
BLOCKER = """
import importlib.machinery, sys

class Blocker:
    OWN = {"piston", "piston_client"}
    ALLOWED = {*sys.stdlib_module_names, *OWN, "numpy", "msgpack", "websockets"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in cls.ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker)
"""


def _run(program):
    command = [sys.executable, "-c", BLOCKER + program]
    return subprocess.run(command, capture_output=True, text=True)


REPOSITORY = Path(__file__).parent.parent


def _project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def _names(requirements):
    return {re.split("[>=<]", requirement)[0] for requirement in requirements}


def test_the_client_needs_three_packages():
    client = _project(REPOSITORY / "packages/piston-client")
    assert _names(client["dependencies"]) == {"numpy", "msgpack", "websockets"}
    assert client["requires-python"] == ">=3.8"
    result = _run("import piston_client; piston_client.Client; print('works')")
    assert result.stdout == "works\n", result.stderr


def test_piston_requires_the_client_of_its_own_version():
    assert piston_client.__version__ == piston.__version__
    project = _project(REPOSITORY)
    assert project["dependencies"][0] == f"piston-client=={piston.__version__}"
    imported = {"pillow": "PIL", "piston-client": "piston_client"}
    assert {imported.get(name, name) for name in _names(project["dependencies"])} == {
        *_PACKAGES[""]
    }


def test_the_extras():
    extras = _project(REPOSITORY)["optional-dependencies"]
    assert set(extras) - {"dev", "record"} == set(_PACKAGES) - {""} | {"client", "full", "inspect"}
    # Of Piston's own dependencies, those that recording alone needs.
    assert set(extras["record"]) < {*_project(REPOSITORY)["dependencies"]}
    # The names that 0.1.0 had.
    assert extras["client"] == extras["full"] == []


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("import piston; piston.load_policy", "piston.load_policy needs"),
        ("from piston.cli import main; sys.exit(main(['presets']))", "error: This command needs"),
        ("from piston.cli import main; sys.exit(main(['train', '--help']))", "This command needs"),
    ],
)
def test_an_incomplete_installation_is_reported(program, what):
    result = _run(program)
    assert result.returncode == 1
    assert what in result.stderr
    assert result.stderr.rstrip().endswith("-m pip install piston")
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
        (
            "metaworld",
            (3, 14),
            "--no-deps --ignore-requires-python metaworld==3.1.1 imageio scipy",
        ),
        ("mujoco", (3, 14), "'piston[sim]'"),
    ],
)
def test_what_an_extra_does_not_bring_is_named(package, version, advice, monkeypatch):
    monkeypatch.setattr(extras, "sys", SimpleNamespace(version_info=version, executable="python"))
    message = str(missing_package("The simulator", package))
    assert message.startswith(f"The simulator needs {package}, which is not installed.")
    assert message.endswith(f"Run: python -m pip install {advice}")
    assert ("does not bring it on this Python" in message) == ("--no-deps" in advice)


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


def test_the_old_name_of_the_client():
    """`piston.client` is `piston_client` with the same modules, in whatever order they come."""
    program = """
import pkgutil
import piston.client.limits
from piston.client import Client
from piston.client.client import make_uri
import piston_client
assert piston.client is piston_client and Client is piston_client.Client
for module in pkgutil.iter_modules(piston_client.__path__):
    old = __import__(f"piston.client.{module.name}", fromlist=["_"])
    assert old is getattr(piston_client, module.name), module
assert "torch" not in sys.modules
print(make_uri("robot", 1))
"""
    assert _run(program).stdout == "ws://robot:1\n", _run(program).stderr


def test_the_old_name_can_be_patched(monkeypatch):
    monkeypatch.setattr("piston.client.client._MAX_REPLY_BYTES", 1000)
    assert piston_client.client._MAX_REPLY_BYTES == 1000


def test_a_missing_compiler_and_missing_headers_are_named_with_their_packages(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ImportError, match=r"C\+\+ compiler.*Python\.h.*apt install g\+\+ python3"):
        require_compiler("--compile")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", sys.executable)
    require_compiler("--compile")

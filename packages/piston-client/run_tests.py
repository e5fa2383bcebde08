"""Run the client's tests with other versions of Python than this one: `make test-client`.

    python packages/piston-client/run_tests.py                      the oldest, 3.10 and the newest
    python packages/piston-client/run_tests.py --only 3.9 newest    these

Each version has an environment in `.venv-client/` with the package, pytest and nothing of Piston.
The package is installed again only if it changed. Servers run in this interpreter
(`PISTON_PYTHON`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ENVIRONMENTS = PACKAGE.parents[1] / ".venv-client"
VERSIONS = [f"3.{minor}" for minor in range(8, 15)]
OWN_VERSION = f"3.{sys.version_info.minor}"
TOOLS = ("pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100")
PIP = ("-m", "pip", "--disable-pip-version-check")
INSTALL = (*PIP, "install", "--only-binary", ":all:")


def find_interpreters() -> dict[str, str]:
    """Return the interpreter of each version that runs here, the oldest first.

    A command in PATH need not work: pyenv has one for each version that any project uses.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for version in VERSIONS:
        in_path = shutil.which(f"python{version}")
        others = sorted(map(str, pyenv.glob(f"versions/{version}[.-]*/bin/python")))
        for interpreter in filter(None, [in_path, *others]):
            if _works(interpreter, version):
                found[version] = interpreter
                break
    return found


def _works(interpreter: str, version: str) -> bool:
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([interpreter, "-c", code], capture_output=True, text=True)
    return result.stdout.strip() == version


def select(found: dict[str, str], names: list[str] | None) -> list[str]:
    """Return the versions to test. By default without this one, which the main suite tests."""
    versions = list(found)
    if names is None:
        versions = [version for version in versions if version != OWN_VERSION]
        chosen = {*versions[:1], *versions[-1:], "3.10"}
    else:
        alias = {"oldest": versions[0], "newest": versions[-1]} if versions else {}
        chosen = {alias.get(name, name) for name in names}
        missing = sorted(chosen - set(versions))
        if missing:
            sys.exit(f"Python {', '.join(missing)} not found. Found: {', '.join(versions)}.")
    return [version for version in versions if version in chosen]


def install(interpreter: str, version: str) -> str:
    """Return the Python of an environment with the package as it is now."""
    folder = ENVIRONMENTS / version
    python, stamp = folder / "bin" / "python", folder / "installed"
    digest = hashlib.sha256(repr((interpreter, TOOLS)).encode())
    for path in [PACKAGE / "pyproject.toml", *sorted(PACKAGE.glob("src/piston_client/*"))]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    if stamp.exists() and stamp.read_text() == digest.hexdigest() and python.exists():
        return str(python)
    if not (python.exists() and _works(str(python), version)):
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    # A folder that an earlier build left would bring modules that are gone.
    shutil.rmtree(PACKAGE / "build", ignore_errors=True)
    with tempfile.TemporaryDirectory() as built:
        build = [sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", built, PACKAGE]
        subprocess.run(build, check=True)
        wheels = list(Path(built).iterdir())
        subprocess.run([python, *INSTALL, *wheels, *TOOLS], check=True)
        # Of the same version, so that pip would keep what was installed before.
        subprocess.run([python, *INSTALL, "--no-deps", "--force-reinstall", *wheels], check=True)
    stamp.write_text(digest.hexdigest())
    return str(python)


def run_tests(python: str) -> tuple[bool, str]:
    """Run the tests; return whether they passed, and pytest's last line."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment.setdefault("PISTON_PYTHON", sys.executable)
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "tests"]
    last = ""
    with subprocess.Popen(
        command, cwd=PACKAGE, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode == 0, last


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="versions such as 3.8; oldest, newest")
    found = find_interpreters()
    chosen = select(found, parser.parse_args().only)
    print(f"Found Python {', '.join(found)}.")
    if not chosen:
        print(f"The client is tested with {OWN_VERSION} only, as part of the main suite.")
        return 0
    print(f"Testing the client with Python {', '.join(chosen)}.")
    results = {}
    for version in chosen:
        print(f"\nPython {version}: {found[version]}", flush=True)
        try:
            results[version] = run_tests(install(found[version], version))
        except subprocess.CalledProcessError as error:
            results[version] = False, f"could not be installed: {error}"
    print("\nTests of the client:")
    for version, (_, result) in results.items():
        print(f"  Python {version:<5} {result}")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Install Piston for development into a virtual environment: what `make setup` runs.

    python3 scripts/install.py .venv --constraints constraints.txt

Everything but Piston itself is installed from wheels; nothing is compiled. pip keeps what it has
downloaded, so a second run goes on where an interrupted one stopped. The syntax of this file is
that of Python 3.6: an interpreter that is too old is refused with a message, not a SyntaxError.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OLDEST = (3, 11)
NEWER = ("python3.13", "python3.14", "python3.12", "python3.11")
# These declare requirements that the parts used here do not have, and that not every Python meets:
# openpi-client NumPy 1; gym-aloha and dm-control labmaze, which has no wheel after Python 3.12;
# metaworld Python 3.13 or older and a MuJoCo for it. The extra `dev` lists what they do need.
WITHOUT_DEPENDENCIES = (
    "openpi-client",
    "gym-aloha==0.1.5",
    'dm-control==1.0.28; python_version == "3.13"',
    'dm-control==1.0.40; python_version >= "3.14"',
    'metaworld==3.1.1; python_version >= "3.14"',
)
UNMET_ON_PURPOSE = (
    "requires labmaze, which is not installed",
    "has requirement numpy<2.0.0",
    "has requirement mujoco==3.3.0",
)
PACKAGES = ("--editable", "packages/piston-client", "--editable", ".[dev]")
# In GB, for each build of torch: the environment, and the wheels, which pip keeps in its cache and,
# while it installs, in a temporary folder too. All are measured but the CPU build's wheels.
GIGABYTES = {"CPU": (2.3, 0.7), "CUDA": (6.2, 2.8)}
# What an environment without packages needs.
GIGABYTES_EMPTY = 0.1
# pip writes the list of a package's files last, and does not tidy up when it is interrupted.
PIP_IS_WHOLE = """
import importlib.metadata
import pip._internal.commands.install
(found,) = importlib.metadata.distributions(name="pip")
assert found.files
"""
NETWORK_ERRORS = ("NewConnectionError", "NameResolutionError", "Timeout", "ProxyError")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", type=Path, help="the folder of the virtual environment")
    parser.add_argument("--constraints", help="a file with the versions to install")
    parser.add_argument("--lock", help="a file with versions and hashes of everything but torch")
    options = parser.parse_args()
    if sys.version_info < OLDEST:
        newer = next((name for name in NEWER if output(name, "--version")), None)
        advice = f"Run the same command with PYTHON={newer}." if newer else "Install one."
        found = sys.version.split()[0]
        sys.exit(f"error: Piston needs Python 3.11 or newer; {sys.executable} is {found}. {advice}")
    begin = time.monotonic()
    pip = (make_environment(options.venv), "-m", "pip")
    install = (*pip, "install", "--only-binary", ":all:")
    if options.constraints:
        install += ("--constraint", options.constraints)
    update_pip(install)
    check_disk_for_torch(options.venv, pip, install)
    if options.lock:
        run(*install, "--require-hashes", "--no-deps", "--requirement", options.lock)
        # torch is not in the lock file: its build depends on the machine's package index.
        run(*install, "torch")
        run(*pip, "install", "--no-deps", "--no-build-isolation", *PACKAGES)
    else:
        run(*install, "torch")
        run(*install, *PACKAGES)
    run(*install, "--no-deps", "--ignore-requires-python", *WITHOUT_DEPENDENCIES)
    check_requirements(pip)
    print(f"Installed into {options.venv} in {time.monotonic() - begin:.0f} s.")


def make_environment(venv):
    """Return the environment's Python; make the environment unless one is there."""
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    version = "import sys; print(*sys.version_info[:2], sep='.')"
    here = output(sys.executable, "-c", version)
    found = output(python, "-c", version)
    if found is None:
        if venv.exists() and not venv.is_dir():
            sys.exit(f"error: {venv} is not a folder. Name another one (VENV=…).")
        if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            sys.exit(
                f"error: {venv} has files in it and is not a virtual environment. Name a new "
                "folder (VENV=…)."
            )
        check_disk(venv, GIGABYTES_EMPTY, "a virtual environment")
        run(sys.executable, "-m", "venv", "--clear", venv)
    elif found != here:
        sys.exit(
            f"error: {venv} holds Python {found}, and {sys.executable} is Python {here}. Remove it "
            "(make clean), or name another folder (VENV=…)."
        )
    elif output(python, "-c", PIP_IS_WHOLE) is None:
        # An earlier run was interrupted while it replaced pip, or uv made the environment.
        check_disk(venv, GIGABYTES_EMPTY, "pip")
        restore_pip(python)
    return python


def restore_pip(python):
    """Install the pip that comes with Python; other packages stay as they are."""
    packages = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # Files of two versions do not fit together.
    for pattern in ("pip", "pip-*.dist-info", "~ip*"):
        for rest in Path(packages).glob(pattern):
            shutil.rmtree(rest)
    run(python, "-m", "ensurepip")


def update_pip(install):
    """Install the pip of the constraints: older versions download everything in a dry run."""
    print("Updating pip …", flush=True)
    ask_index((*install, "--quiet", "--upgrade", "pip"))


def check_disk_for_torch(venv, pip, install):
    """Stop before the download if a disk is too small for the build of torch that the index has.

    What an earlier, interrupted run has installed already is not needed again.
    """
    print("Looking up which build of torch this machine gets …", flush=True)
    report = ask_index((*install, "--dry-run", "--quiet", "--report", "-", "torch"))
    names = [entry["metadata"]["name"] for entry in json.loads(report)["install"]]
    if "torch" not in names:
        return
    build = "CUDA" if any(name.startswith("nvidia") for name in names) else "CPU"
    environment, wheels = GIGABYTES[build]
    folders = [(venv, environment), (Path(tempfile.gettempdir()), wheels)]
    cache = output(*pip, "cache", "dir")
    if cache is not None:
        folders.append((Path(cache), wheels))
    disks = {}
    for folder, needed in folders:
        disk = first_existing(folder).stat().st_dev
        first, before = disks.get(disk, (folder, 0))
        disks[disk] = first, before + needed
    for folder, needed in disks.values():
        check_disk(folder, needed, f"Piston with torch's {build} build")


def ask_index(command):
    """Return what pip prints; stop with one line if no package index replies."""
    impatient = (*command, "--retries", "1", "--timeout", "15")
    process = subprocess.run(impatient, capture_output=True, text=True)
    if not process.returncode:
        return process.stdout
    if any(name in process.stderr for name in NETWORK_ERRORS):
        sys.exit(
            "error: No package index replies. Check the network and run the same command again; "
            "it goes on where it stopped."
        )
    sys.exit(f"{process.stderr}error: pip found nothing to install; its message is above.")


def check_disk(folder, needed, what):
    free = shutil.disk_usage(first_existing(folder)).free / 1e9
    if free < needed:
        # Rounded down, so that it never looks as if it were enough.
        sys.exit(
            f"error: {folder.resolve()} is on a disk with {int(free * 10) / 10} GB free; {what} "
            f"needs {needed:.1f} GB there. Free some, or name folders elsewhere: VENV=… for the "
            "environment, TMPDIR=… and PIP_CACHE_DIR=… for downloads."
        )


def first_existing(folder):
    return next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())


def check_requirements(pip):
    process = subprocess.run((*pip, "check"), stdout=subprocess.PIPE, text=True)
    unmet = [
        line
        for line in process.stdout.splitlines()
        if not any(expected in line for expected in UNMET_ON_PURPOSE)
    ]
    if process.returncode and unmet:
        sys.exit("\n".join(["error: The installed packages do not fit together:", *unmet]))


def run(*command):
    process = subprocess.run(command)
    if process.returncode:
        shown = " ".join(map(str, command))
        sys.exit(f"error: This command failed (exit code {process.returncode}): {shown}")


def output(*command):
    """Return what a command prints; None if it does not exist or fails."""
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return None if process.returncode else process.stdout.decode().strip()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on where this one stopped.")

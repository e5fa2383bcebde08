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
UNMET_ON_PURPOSE = ("openpi-client ", "gym-aloha ", "dm-control ", "metaworld ")
PACKAGES = ("--editable", "packages/piston-client", "--editable", ".[dev]")
# Measured: 2.2 and 5.8 for the environment; besides, pip keeps the wheels and a copy meanwhile.
GIGABYTES_CPU, GIGABYTES_CUDA = 4, 11
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
    check_network_and_disk(options.venv, install)
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
    """Return the environment's Python; make the environment unless a complete one is there."""
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    version = "import pip, sys; print(*sys.version_info[:2], sep='.')"
    here = output(sys.executable, "-c", version)
    found = output(python, "-c", version)
    if found is None:
        run(sys.executable, "-m", "venv", "--clear", venv)
    elif found != here:
        sys.exit(
            f"error: {venv} holds Python {found}, and {sys.executable} is Python {here}. Remove it "
            "(make clean), or name another folder (VENV=…)."
        )
    return python


def check_network_and_disk(venv, install):
    """Stop early if pip would fail later: no package index replies, or the disk is too small.

    Which build of torch the index offers decides how much is needed.
    """
    print("Looking up which build of torch this machine gets …", flush=True)
    options = ("--dry-run", "--quiet", "--retries", "1", "--report", "-")
    process = subprocess.run((*install, *options, "torch"), capture_output=True, text=True)
    if process.returncode:
        if any(name in process.stderr for name in NETWORK_ERRORS):
            sys.exit(
                "error: No package index replies. Check the network and run the same command "
                "again; it goes on where it stopped."
            )
        sys.exit(f"{process.stderr}error: pip cannot install torch here; its message is above.")
    names = [entry["metadata"]["name"] for entry in json.loads(process.stdout)["install"]]
    build, needed = "CPU", GIGABYTES_CPU
    if any(name.startswith("nvidia") for name in names):
        build, needed = "CUDA", GIGABYTES_CUDA
    free = shutil.disk_usage(venv).free / 1e9
    if "torch" in names and free < needed:
        sys.exit(
            f"error: {venv.resolve()} is on a disk with {free:.1f} GB free; installing with "
            f"torch's {build} build needs {needed} GB. Free some, or name a folder elsewhere "
            "(VENV=…)."
        )


def check_requirements(pip):
    process = subprocess.run((*pip, "check"), stdout=subprocess.PIPE, text=True)
    unmet = [line for line in process.stdout.splitlines() if not line.startswith(UNMET_ON_PURPOSE)]
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

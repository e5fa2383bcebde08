"""Install Piston for development into a virtual environment: the step `setup` of the Makefile.

    python3 scripts/install.py .venv --constraints constraints.txt

Everything but Piston itself is installed from wheels; nothing is compiled. pip keeps what it has
downloaded, so a second run goes on where an interrupted one stopped. The standard library of any
Python 3 can run this file, so that an interpreter that is too old is refused by name.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
NEWER = ("python3.13", "python3.14", "python3.12", "python3.11")
# These declare dependencies that the parts used here do not need, and that not every Python can
# install: openpi-client NumPy 1, gym-aloha and dm-control labmaze, which has no wheel after Python
# 3.12. pyproject.toml lists what they do need as `dev`.
WITHOUT_DEPENDENCIES = (
    "openpi-client",
    "gym-aloha==0.1.5",
    'dm-control==1.0.28; python_version >= "3.13"',
)
UNMET_ON_PURPOSE = ("openpi-client ", "gym-aloha ", "dm-control ")
PACKAGES = ("--editable", "packages/piston-client", "--editable", ".[dev]")
# Measured: the environment, and what pip unpacks or keeps besides while it installs.
GIGABYTES_CPU, GIGABYTES_CUDA = 3, 9
NETWORK_ERRORS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "Max retries exceeded",
    "ProxyError",
    "ReadTimeoutError",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", help="the folder of the virtual environment")
    parser.add_argument("--constraints", help="a file with the versions to install")
    parser.add_argument("--lock", help="a file with versions and hashes of everything but torch")
    options = parser.parse_args()
    if sys.version_info < OLDEST:
        newer = next((name for name in NEWER if output(name, "--version")), None)
        advice = "Run the same command with PYTHON={}.".format(newer) if newer else "Install one."
        found = sys.version.split()[0]
        stop("Piston needs Python 3.11 or newer; {} is {}. {}", sys.executable, found, advice)
    begin = time.monotonic()
    python = make_environment(options.venv)
    wheels = (python, "-m", "pip", "install", "--only-binary", ":all:")
    constraints = ("--constraint", options.constraints) if options.constraints else ()
    check_disk(options.venv, [*wheels, *constraints, "torch"])
    if options.lock:
        run(*wheels, "--require-hashes", "--no-deps", "--requirement", options.lock)
        # torch is not in the lock file: its build depends on the machine's package index.
        run(*wheels, *constraints, "torch")
        run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", *PACKAGES)
    else:
        run(*wheels, *constraints, "torch")
        run(*wheels, *constraints, *PACKAGES)
        run(*wheels, *constraints, "--no-deps", *WITHOUT_DEPENDENCIES)
    check_requirements(python)
    print("Installed into {} in {:.0f} s.".format(options.venv, time.monotonic() - begin))


def make_environment(venv):
    """Return the environment's Python; make the environment unless a complete one is there."""
    python = os.path.join(venv, "Scripts" if os.name == "nt" else "bin", "python")
    ask = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    found = output(python, "-c", ask)
    here = "%d.%d" % sys.version_info[:2]
    if found is None:
        run(sys.executable, "-m", "venv", "--clear", venv)
    elif found != here:
        stop(
            "{} holds Python {}, and this is {}. Remove it (make clean) or name another (VENV=…).",
            venv,
            found,
            here,
        )
    return python


def check_disk(venv, install):
    """Stop if the disk is too small, or if no package index replies: pip would say so late.

    The CUDA build of torch needs far more than the CPU build. Which one comes is up to the index.
    """
    print("Looking up which build of torch the package index has …", flush=True)
    process = subprocess.run(
        [*install, "--dry-run", "--quiet", "--retries", "1", "--report", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    if process.returncode:
        if any(name in process.stderr for name in NETWORK_ERRORS):
            stop("No package index replies. Check the network, then run the same command again.")
        sys.stderr.write(process.stderr)
        stop("pip found no wheel of torch for this Python and system; its message is above.")
    names = [entry["metadata"]["name"] for entry in json.loads(process.stdout)["install"]]
    if "torch" not in names:  # it is installed
        return
    is_cuda = any(name.startswith("nvidia") for name in names)
    needed = GIGABYTES_CUDA if is_cuda else GIGABYTES_CPU
    free = shutil.disk_usage(venv).free / 1e9
    if free < needed:
        message = "The disk of {} has {:.1f} GB free; installing torch with {} needs {} GB."
        stop(message, os.path.abspath(venv), free, "CUDA" if is_cuda else "CPU support", needed)


def check_requirements(python):
    process = subprocess.run(
        [python, "-m", "pip", "check"], stdout=subprocess.PIPE, universal_newlines=True
    )
    unmet = [line for line in process.stdout.splitlines() if not line.startswith(UNMET_ON_PURPOSE)]
    if process.returncode and unmet:
        stop("The packages do not fit together:\n{}", "\n".join(unmet))


def run(*command):
    returncode = subprocess.run(command).returncode
    if returncode:
        stop("This command failed (exit code {}): {}", returncode, " ".join(command))


def output(*command):
    """Return what a command prints; None if it is not there or fails."""
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return None if process.returncode else process.stdout.decode().strip()


def stop(message, *values):
    sys.exit("error: " + message.format(*values))


if __name__ == "__main__":
    main()

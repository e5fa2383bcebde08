"""Stages of a demo, each a `piston` command in a process of its own: run, timed, remembered.

Knows processes and the folder that they share; knows nothing of what the commands do.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.markup import escape

from piston.cli.screen import console
from piston.report.stages import Stage, Stages, read_stages

# Its presence says that a folder is a demo's own, to be deleted by the next one.
STATE = "piston-demo.json"
_OWN = ("data", "assets", "checkpoints", "eval", "cache", "report.html", "animation.webp")
_SECONDS_TO_START, _SECONDS_TO_STOP = 120.0, 60.0


class StageFailed(RuntimeError):
    """A command ended with an error, which it has told itself."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"The stage {stage!r} failed with exit code {code}.")
        self.code = code


def begin(out: Path, job: Mapping[str, Any], *, resume: bool) -> Job:
    """A clean folder, or with `resume` the one that the same job was working in."""
    state = out / STATE
    if state.is_file():
        stages = read_stages(state)
        if resume and stages.job != job:
            raise ValueError(
                f"{out} holds another demo ({stages.job}), not this one ({dict(job)}). Leave out "
                "--resume to begin again, or give another --out."
            )
        if resume:
            return Job(out, stages)
    elif out.exists() and any(out.iterdir()):
        raise FileExistsError(
            f"{out} was not made by `piston demo` (it holds no {STATE}), so nothing in it is "
            "deleted. Give another --out."
        )
    out.mkdir(parents=True, exist_ok=True)
    for path in (out / name for name in _OWN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    stages = Stages(job)
    stages.write(state)
    return Job(out, stages)


class Job:
    """Runs stages one after another; `stages` tells what is finished, here and in its file."""

    def __init__(self, out: Path, stages: Stages) -> None:
        self.out = out
        self.stages = stages
        self.state_file = out / STATE

    def is_finished(self, stage: str) -> bool:
        return self.stages.get(stage) is not None

    def do(
        self, stage: str, words: Iterable[Any], result: Callable[[], str], *, again: bool = False
    ) -> None:
        """`piston VERB words…`, where the verb is the stage's first word. Done once, or `again`."""
        if self.is_finished(stage) and not again:
            return
        began = time.monotonic()
        process = self._start(stage, words)
        with _stopped_with_us(process):
            code = process.wait()
        if code:
            _fail(stage, code)
        self._finish(stage, time.monotonic() - began, result())

    @contextlib.contextmanager
    def serve(self, checkpoint: Path) -> Iterator[str]:
        """A server in the background, ready on entry; its address."""
        began, port = time.monotonic(), _free_port()
        process = self._start("serve", (checkpoint, "--port", port))
        try:
            while not _is_healthy(port):
                if process.poll() is not None:
                    _fail("serve", process.returncode or 1)
                if time.monotonic() - began > _SECONDS_TO_START:
                    raise TimeoutError(f"The server took over {_SECONDS_TO_START:.0f} s to start.")
                time.sleep(0.1)
            uri = f"ws://127.0.0.1:{port}"
            self._finish("serve", time.monotonic() - began, f"ready at {uri}")
            yield uri
        finally:
            process.terminate()
            _wait_or_kill(process)

    def _start(self, stage: str, words: Iterable[Any]) -> subprocess.Popen[bytes]:
        command = [stage.split()[0], *map(str, words)]
        screen = console()
        screen.rule(f"[bold]{stage}[/bold]", align="left")
        shown = escape(f"piston {shlex.join(command)}")
        screen.print(f"[dim]$ {shown}[/dim]", soft_wrap=True, highlight=False)
        # Decoded frames too stay in the demo's folder, to be deleted with it.
        environment = {**os.environ, "PISTON_HOME": str(self.out / "cache")}
        return subprocess.Popen([sys.executable, "-m", "piston.cli", *command], env=environment)

    def _finish(self, stage: str, seconds: float, result: str) -> None:
        self.stages = self.stages.with_stage(Stage(stage, seconds, result), _peak_of_children())
        self.stages.write(self.state_file)


@contextlib.contextmanager
def ends_with_children() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that no process is left behind."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _stopped_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # The terminal has told it as well: let it finish what it is writing.
        _wait_or_kill(process)
        raise
    except BaseException:
        process.terminate()
        _wait_or_kill(process)
        raise


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _fail(stage: str, code: int) -> NoReturn:
    # A process that a signal ended has its negative number; a shell would say it like this.
    raise StageFailed(stage, 128 - code if code < 0 else code)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _is_healthy(port: int) -> bool:
    # Never through a proxy: it is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _peak_of_children() -> int:
    """Of the largest process that has ended, those that it started included."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

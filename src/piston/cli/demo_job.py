"""Stages of a demo, each a `piston` command in a process of its own: run, measured, remembered.

Knows processes and the folder that they share; knows nothing of what the commands do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.markup import escape

from piston.cli.console import console
from piston.report.stages import LARGEST, TOGETHER, Stage, Stages, read_stages

# Its presence says that a folder is a demo's own, to be deleted by the next one.
STATE = "piston-demo.json"
_OWN = ("data", "assets", "checkpoints", "eval", "cache", "report.html", "animation.webp")
_SECONDS_TO_START, _SECONDS_TO_STOP = 120.0, 60.0
# Looking at the memory of a process of one gigabyte takes some 15 ms.
_SECONDS_BETWEEN_SAMPLES = 1.0
_PROC = Path("/proc")


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
        if resume and (others := _differences(stages.job, job)):
            raise ValueError(
                f"{out} holds another demo. It differs in {', '.join(others)}. Leave out --resume "
                "to delete it and begin again, or give another --out."
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


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What this job says otherwise: names, with the values where these are short."""
    return [
        f"{name} ({there.get(name)} there, {here[name]} now)"
        if isinstance(here[name], int | str)
        else name
        for name in here
        if there.get(name) != here[name]
    ]


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
        with self._attempt(stage) as measured:
            process = self._start(stage, words)
            with _stopped_with_us(process):
                code = process.wait()
            if code:
                _fail(stage, code)
            outcome = result()
        self._finish(stage, measured, outcome)

    @contextlib.contextmanager
    def serve(self, checkpoint: Path) -> Iterator[str]:
        """A server in the background, ready on entry; its address."""
        port = _free_port()
        process = self._start("serve", (checkpoint, "--port", port))
        try:
            with self._attempt("serve") as measured:
                _wait_until_healthy(process, port)
            uri = f"ws://127.0.0.1:{port}"
            self._finish("serve", measured, f"ready at {uri}")
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

    @contextlib.contextmanager
    def _attempt(self, stage: str) -> Iterator[_Measured]:
        """One that ends in an error, or is stopped, is remembered as unfinished."""
        measured = _Measured()
        try:
            with measured:
                yield measured
        except BaseException:
            peak = measured.peak_memory_bytes
            self._remember(self.stages.with_attempt(stage, measured.seconds, peak))
            raise

    def _finish(self, stage: str, measured: _Measured, result: str) -> None:
        finished = Stage(stage, measured.seconds, result)
        self._remember(self.stages.with_stage(finished, measured.peak_memory_bytes))

    def _remember(self, stages: Stages) -> None:
        whose = TOGETHER if _has_proc() else LARGEST
        self.stages = dataclasses.replace(stages, peak_memory_of=whose)
        self.stages.write(self.state_file)


class _Measured:
    """Seconds from entry to exit, and the most memory that was used meanwhile.

    On Linux that of this process and all below it together, looked at once a second; elsewhere that
    of the largest process that has ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.peak_memory_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Measured:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self._ended.set()
        self._thread.join()
        if not _has_proc():
            self.peak_memory_bytes = _peak_of_children()

    def _watch(self) -> None:
        while _has_proc():
            self.peak_memory_bytes = max(self.peak_memory_bytes, memory_of_tree(os.getpid()))
            if self._ended.wait(_SECONDS_BETWEEN_SAMPLES):
                return


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


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    began = time.monotonic()
    while not _is_healthy(port):
        if process.poll() is not None:
            _fail("serve", process.returncode or 1)
        if time.monotonic() - began > _SECONDS_TO_START:
            raise TimeoutError(f"The server took over {_SECONDS_TO_START:.0f} s to start.")
        time.sleep(0.1)


def _is_healthy(port: int) -> bool:
    # Never through a proxy: it is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _has_proc() -> bool:
    return (_PROC / "self" / "stat").exists()


def memory_of_tree(root: int) -> int:
    """Bytes of a process and all below it, on Linux. What several share is counted once."""
    tree = process_tree(root).items()
    return sum(_share_of_memory(process) or resident for process, resident in tree)


def process_tree(root: int) -> dict[int, int]:
    """A process and all below it, each with its resident bytes; on Linux."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        # A process may be gone by now.
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, … and in the 22nd place pages.
            words = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            children.setdefault(int(words[1]), []).append(process)
            resident[process] = int(words[21]) * resource.getpagesize()
    found, waiting = {}, [root]
    while waiting:
        process = waiting.pop()
        found[process] = resident.get(process, 0)
        waiting += children.get(process, ())
    return found


def _share_of_memory(process: int) -> int | None:
    """Its own memory and its share of what others use as well; None where the kernel is silent."""
    try:
        lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)


def _peak_of_children() -> int:
    """Of the largest process that has ended, those that it started included."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

"""Where numbers of a run go: always `metrics.jsonl` in its folder, and where else one asks.

Knows names and numbers; knows nothing of training.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from piston.config import TrainConfig
from piston.serialization import to_json

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id.txt"
_WANDB_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
# A list has one number per dimension; what is None or not finite is left out.
Numbers = Mapping[str, float | Sequence[float] | None]


class Tracker(Protocol):
    def log(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All of them as one. What cannot be written is told of; training goes on without it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, step: int, numbers: Numbers) -> None:
        known = {name: value for name, value in numbers.items() if _is_known(value)}
        for tracker in self._trackers:
            try:
                tracker.log(step, known)
            except Exception as error:  # theirs may be of any kind
                self._tell(tracker, f"Metrics of step {step} were not written", error)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._tell(tracker, "Metrics were not all written", error)

    def _tell(self, tracker: Tracker, what: str, error: Exception) -> None:
        """Once for each of them: what is broken usually stays so."""
        name = type(tracker).__name__
        if name not in self._failed:
            self._failed.add(name)
            logger.error("%s: %s (%s; training goes on, this is told once)", what, error, name)


def require_trackers(config: TrainConfig) -> None:
    """Refuse what is not installed, before anything slow happens."""
    for name in config.tracking:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"--tracking {name} needs {name}. Run: pip install 'piston[track]'")


def check_logins(config: TrainConfig) -> None:
    """Refuse a service that does not let us in, before an earlier run is deleted."""
    if "wandb" in config.tracking:
        import wandb

        if wandb.setup().settings.mode not in _WANDB_WITHOUT_LOGIN:
            with _wandb_errors():
                wandb.login(verify=True)


@contextmanager
def _wandb_errors() -> Iterator[None]:
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise ValueError(
            f"--tracking wandb: {error} Run `wandb login`, set WANDB_MODE=offline to keep the "
            "metrics in the run's folder, or leave the option out."
        ) from error


def make_trackers(config: TrainConfig, run: Path, first_step: int) -> Trackers:
    kinds: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    asked = [kinds[name](config, run, first_step) for name in config.tracking]
    return Trackers([JsonLines(run / METRICS), *asked])


class JsonLines:
    """One JSON object per line. A resumed run appends, after the lines up to where it resumes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, numbers: Numbers) -> None:
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What was logged; what is not a whole line (cut off, or damaged) is left out."""
    lines = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            numbers = json.loads(line.decode("utf-8"))
        except ValueError:
            numbers = None
        if isinstance(numbers, dict) and isinstance(numbers.get("step"), int):
            lines.append(numbers)
        else:
            logger.debug("Not a whole line in %s: %s", path, line)
    return lines


def forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that a resumed run does again."""
    if path.is_file():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        fresh = path.with_suffix(".unfinished")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        fresh.replace(path)


class TensorBoard:
    """Of a resumed run, what was logged after `first_step` before is not shown any more."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:  # noqa: ARG002
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in flat(numbers).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """`WANDB_MODE=offline` keeps everything in the run's folder."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:  # noqa: ARG002
        import wandb

        with _wandb_errors():
            self._run: Any = wandb.init(
                project="piston",
                name=config.exp_name,
                id=_own_id(run / WANDB_ID),
                resume="allow",
                dir=str(run),
                config=to_json(config),
            )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(flat(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _own_id(path: Path) -> str:
    """The same for a run that is resumed, another one for a run that begins again."""
    if not path.is_file():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def flat(numbers: Numbers) -> dict[str, float]:
    """Lists of numbers, one per dimension, as numbers of their own."""
    result: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Sequence):
            result |= {f"{name}/{index}": number for index, number in enumerate(value)}
        elif value is not None:
            result[name] = value
    return result


def _is_known(value: float | Sequence[float] | None) -> bool:
    """JSON has no numbers that are not finite."""
    return value is not None and (not isinstance(value, float) or math.isfinite(value))

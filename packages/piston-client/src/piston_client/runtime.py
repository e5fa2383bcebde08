"""The control loop: observe, ask the agent, act, at a fixed rate.

The agent is asked in a background thread and has most of a period to answer. If it does not, or if
the server is away, the last action is held and the loop goes on, until the agent answers or
`max_hold` is over. However a run ends, `safe_action` is applied once more, if one was given.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from piston_client.client import TRANSIENT
from piston_client.limits import Limits, checked_actions
from piston_client.worker import Worker

logger = logging.getLogger(__name__)

# The part of a period after which an answer is too late for its step; and the part that the agent
# has at least, if the step itself began late.
_ANSWER_BY, _AT_LEAST = 0.9, 0.5
# How often a long wait checks whether it is to stop.
_CHECK_SECONDS = 0.1

_STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]

EndedBy = Literal["done", "max_steps", "stopped", "interrupted", "held", "error"]
if TYPE_CHECKING:  # Python 3.8 cannot evaluate it
    SafeAction = Callable[[Mapping[str, Any], np.ndarray | None], np.ndarray]


class Environment(Protocol):
    """A robot, or a simulation of one."""

    def reset(self) -> None:
        """Begin an episode."""

    def get_observation(self) -> Mapping[str, Any]:
        """Return an observation in the robot's own keys, in arrays that are not reused later."""

    def apply_action(self, action: np.ndarray, /) -> None:
        """Execute one action (dim,)."""

    def is_done(self) -> bool:
        """Return whether the episode is over."""


class Agent(Protocol):
    """A broker: one action per call."""

    def infer(self, observation: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Return a result with `actions` (dim,), and `held` if the action is not a new one."""

    def reset(self) -> None: ...


class Hooks:
    """Callbacks: override what you need. They run in the control loop, so they must be quick."""

    def on_start(self) -> None:
        """Before the first episode."""

    def on_episode_start(self, episode: int) -> None:
        """After the environment and the agent are reset."""

    def on_observation(self, step: int, observation: Mapping[str, Any]) -> None:
        """Before the agent is asked."""

    def on_action(self, step: int, action: np.ndarray, result: Mapping[str, Any] | None) -> None:
        """After an action was applied; `result` is the agent's, None if the action was held."""

    def on_hold(self, step: int, reason: str) -> None:
        """When the agent has no new action for this step."""

    def on_overrun(self, step: int, seconds: float) -> None:
        """When a step took this much longer than a period."""

    def on_episode_end(self, episode: int, ended_by: EndedBy) -> None:
        """After an episode, also if it ended with an error."""

    def on_end(self, summary: Summary) -> None:
        """After the last episode, however it ended."""


class Pacer:
    """Steps begin at `start + n · period`, so that delays do not add up.

    A step that takes too long is an overrun. The next one begins at once and is shorter; steps
    whose whole time has passed are skipped, not made up for in a burst.
    """

    def __init__(self, period: float, start: float) -> None:
        self.start = start
        self.begin = start  # when the current step is due to begin
        self._period = period
        self._index = 0

    def advance(self, now: float) -> tuple[float, int]:
        """Go on to the next step; return the overrun in seconds and the number of skipped steps."""
        overrun = max(0.0, now - (self.start + (self._index + 1) * self._period))
        num_skipped = math.floor(overrun / self._period) if overrun > self._period else 0
        self._index += 1 + num_skipped
        self.begin = self.start + self._index * self._period
        return overrun, num_skipped


class Percentiles(NamedTuple):
    """How long something took, in milliseconds."""

    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not seconds:
            return cls(*[math.nan] * 4)
        return cls(*map(float, np.percentile(1e3 * np.asarray(seconds), [50, 90, 99, 100])))

    def __str__(self) -> str:
        if math.isnan(self.p50):
            return "nothing to measure"
        names = ("median", "90 %", "99 %", "worst")
        return ", ".join(f"{name} {value:.2f} ms" for name, value in zip(names, self))


@dataclasses.dataclass
class Summary:
    """What a run was like; the runtime fills it in. Times are in seconds."""

    ended_by: EndedBy = "error"
    num_episodes: int = 0
    # From the first step to the last, without resets.
    seconds: float = 0.0
    # Steps that took longer than a period, by how much at worst, and steps left out because of it.
    num_overruns: int = 0
    worst_overrun: float = 0.0
    num_skipped: int = 0
    # Steps without an answer of their own, and the longest time without one.
    num_held: int = 0
    longest_hold: float = 0.0
    # Steps whose action was outside the limits and was clamped.
    num_clamped: int = 0
    # The last error that made the robot hold.
    last_error: Exception | None = None
    # How long each answer of the agent took, and each whole step.
    agent_seconds: list[float] = dataclasses.field(default_factory=list, repr=False)
    step_seconds: list[float] = dataclasses.field(default_factory=list, repr=False)

    @property
    def num_steps(self) -> int:
        return len(self.step_seconds)

    @property
    def agent(self) -> Percentiles:
        return Percentiles.of(self.agent_seconds)

    @property
    def step(self) -> Percentiles:
        return Percentiles.of(self.step_seconds)

    @property
    def achieved_hz(self) -> float:
        return self.num_steps / self.seconds if self.seconds > 0 else math.nan

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps, episodes: {self.num_episodes}, {self.achieved_hz:.1f} Hz; "
            f"ended by: {self.ended_by}\n"
            f"overruns: {self.num_overruns} (worst {1e3 * self.worst_overrun:.1f} ms), "
            f"{self.num_skipped} steps left out\n"
            f"held: {self.num_held} steps (longest {self.longest_hold:.2f} s)\n"
            f"clamped to the limits: {self.num_clamped} steps\n"
            f"agent: {self.agent}\nstep: {self.step}"
        )


class Runtime:
    """`Runtime(robot, ActionChunkBroker(Client(…), 25), control_hz=50).run()`

    With `control_hz=None` each step waits for the agent and nothing is paced: for simulations.
    `safe_action(observation, last_action)` says what to do while there is no new action; by default
    the last one is repeated, which is right for positions. For velocities give zeros. `max_hold` is
    in seconds; after it the run ends (`ended_by == "held"`). Ctrl-C ends after the current step, as
    do SIGTERM and SIGHUP (a terminal that is closed), which are sent again after the end.

    A given `safe_action` is also applied at the end of each episode and of the run, however it ends
    (done, stopped, a signal, any exception). If that fails, the failure is logged and raised, or
    added as a note to the exception that ended the run. No signal interrupts it.

    Actions outside `limits` are clamped or end the run, see `Limits`. By default they are those in
    the policy's metadata; if it has none, a warning says so. `False` is for none. They do not apply
    to `safe_action`: a robot that is to stand still must not be slowed down only by `max_step`.
    """

    def __init__(
        self,
        environment: Environment,
        agent: Agent,
        control_hz: float | None,
        *,
        hooks: Sequence[Hooks] = (),
        num_episodes: int = 1,
        max_steps: int | None = None,
        max_hold: float = 2.0,
        safe_action: SafeAction | None = None,
        limits: Limits | Literal[False] | None = None,
    ) -> None:
        if control_hz is not None and control_hz <= 0:
            raise ValueError(f"control_hz is positive, or None for no pacing; found {control_hz}.")
        if not (limits is None or limits is False or isinstance(limits, Limits)):
            raise TypeError(
                "limits is a Limits, False for none, or None for those of the policy's metadata; "
                f"found {limits!r}."
            )
        self.environment = environment
        self.agent = agent
        self.control_hz = control_hz
        self.hooks = hooks
        self.num_episodes = num_episodes
        self.max_steps = max_steps
        self.max_hold = max_hold
        self.safe_action = safe_action
        self.limits = limits
        self._period = 0.0 if control_hz is None else 1 / control_hz
        self._worker = Worker("piston agent")
        # Plain, not an Event: a signal handler that takes an Event's lock may wait for itself.
        self._stop: EndedBy | None = None
        self._signal: int | None = None
        self._summary = Summary()
        # Whether the robot may be moving, and whether that is being ended: no Ctrl-C meanwhile.
        self._may_move = False
        self._is_ending = False
        # Of the episode. The worker fills in the limits before it asks for the first action.
        self._pacer: Pacer | None = None
        self._limits: Limits | None = None
        self._has_warned = False  # that there are none
        self._last_observation: Mapping[str, Any] | None = None
        self._last_action: np.ndarray | None = None
        self._pending: Future[Mapping[str, Any]] | None = None
        self._hold_start: float | None = None

    def stop(self) -> None:
        """End after the current step; from a hook or another thread."""
        self._stop = "stopped"

    def run(self) -> Summary:
        """Run all episodes. An error of the agent that will not pass ends the run and is raised."""
        self._stop = None
        self._summary = Summary()
        self._may_move, self._is_ending = True, False
        self._forget_episode()
        with self._handling_signals():
            try:
                with self._ending_safely():
                    self._call_hooks("on_start")
                    for episode in range(self.num_episodes):
                        self._summary.ended_by = "error"
                        self._summary.ended_by = self._run_episode(episode)
                        if self._summary.ended_by not in ("done", "max_steps"):
                            break
            finally:
                self._call_hooks("on_end", self._summary)
        return self._summary

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """End the run after the step at the first signal, at once at a second one.

        Signals other than Ctrl-C are sent again afterwards, to whoever handled them before.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signal = None
        handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # SIGHUP is ignored under nohup
                signal.signal(number, self._interrupt)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
            if self._signal is not None:
                signal.raise_signal(self._signal)

    def _interrupt(self, number: int, _: object) -> None:
        if number != signal.SIGINT:
            self._signal = number
        if self._stop != "interrupted":
            self._stop = "interrupted"
        elif not self._is_ending:
            # A third Ctrl-C must not prevent the safe action.
            self._is_ending = self._may_move
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _ending_safely(self) -> Iterator[None]:
        """Apply the safe action after the block, however it ends."""
        try:
            yield
        except BaseException as error:
            self._end_safely(error)
            raise
        self._end_safely(None)

    def _end_safely(self, error: BaseException | None) -> None:
        """Apply the safe action if the robot may be moving, because of an error or without one."""
        if not self._may_move:
            return
        self._is_ending = True
        try:
            if self.safe_action is not None:
                observation = self._last_observation
                if observation is None:
                    observation = self.environment.get_observation()
                self._apply_safe_action(observation)
        except Exception as failure:
            message = (
                "The robot may still be moving: safe_action could not be applied at the end: "
                f"{type(failure).__name__}: {failure}"
            )
            logger.exception(message)
            if error is None:
                _add_note(failure, message)
                raise
            _add_note(error, message)
        finally:
            self._may_move = self._is_ending = False

    def _run_episode(self, episode: int) -> EndedBy:
        self._may_move = True
        # Before the robot moves: a safe action from here on must not follow from where it was.
        self._forget_episode()
        self.environment.reset()
        # In the worker, after whatever the agent is still doing for the last episode.
        reset = self._worker.submit(self.agent.reset)
        if self._wait(math.inf, reset):
            reset.result()
        self._call_hooks("on_episode_start", episode)
        ended_by: EndedBy = "error"
        try:
            with self._ending_safely():
                ended_by = self._run_steps()
        except BaseException:
            ended_by = "error"
            raise
        finally:
            self._summary.num_episodes += 1
            if self._pacer is not None:
                self._summary.seconds += time.monotonic() - self._pacer.start
            self._call_hooks("on_episode_end", episode, ended_by)
        return ended_by

    def _forget_episode(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self._pending = self._pacer = self._hold_start = self._limits = None
        self._last_observation = self._last_action = None

    def _run_steps(self) -> EndedBy:
        for step in itertools.count():
            if self._stop is not None:
                return self._stop
            if self.environment.is_done():
                return "done"
            if step == self.max_steps:
                return "max_steps"
            if not self._run_step(step):
                break
            self._wait_for_next_step(step)
        return self._stop or "held"

    def _run_step(self, step: int) -> bool:
        """Observe, ask, act; return False to end the run here."""
        begin = time.monotonic()
        observation = self._last_observation = self.environment.get_observation()
        self._call_hooks("on_observation", step, observation)
        has_fallback = self._last_action is not None or self.safe_action is not None
        if self._pacer is None and has_fallback:
            self._pacer = Pacer(self._period, begin)
        answer = self._answer(observation, begin, has_fallback)
        if self._pacer is None:
            # The first answer may take long (a model warms up); the rate counts from here.
            begin = time.monotonic()
            self._pacer = Pacer(self._period, begin)
        if self._stop is not None:
            return False
        if isinstance(answer, str):
            result: Mapping[str, Any] = {"actions": self._last_action}
            hold_reason = answer
        else:
            result = answer
            hold_reason = "the agent holds its last action" if answer.get("held") else ""
        if hold_reason and self.safe_action is not None:
            action = self._apply_safe_action(observation)
        else:
            action = self._apply(result, self._limits)
        self._call_hooks("on_action", step, action, None if hold_reason else result)
        self._summary.step_seconds.append(time.monotonic() - begin)
        return self._count_hold(step, hold_reason)

    def _apply_safe_action(self, observation: Mapping[str, Any]) -> np.ndarray:
        assert self.safe_action is not None
        action = np.asarray(self.safe_action(observation, self._last_action))
        if np.issubdtype(action.dtype, np.integer):
            # Zeros written as [0, 0] are meant as they are; a policy's integers are a mistake.
            action = action.astype(np.float64)
        return self._apply({"actions": action}, None)

    def _apply(self, result: Mapping[str, Any], limits: Limits | None) -> np.ndarray:
        """Execute one action. All pass these checks: the agent's own, held and safe ones."""
        one = "one action (dim,): wrap a policy that gives chunks, such as a Client, in a broker"
        last = self._last_action
        action = checked_actions(result, 1, one, None if last is None else last.size)
        if limits is not None:
            action, problem = limits.clamp(action, last)
            if problem and not self._summary.num_clamped:
                logger.warning("%s. It is clamped; further ones are only counted.", problem)
            self._summary.num_clamped += bool(problem)
        # A copy: what is held must not change with what the robot does to its own.
        self._last_action = action.copy()
        self.environment.apply_action(action)
        return action

    def _answer(
        self, observation: Mapping[str, Any], begin: float, has_fallback: bool
    ) -> Mapping[str, Any] | str:
        """Return the agent's result, or the reason why there is none (it is late, or away)."""
        if self._pending is None:
            self._pending = self._worker.submit(self._ask, observation)
        deadline = math.inf
        if self._period and self._pacer is not None:
            planned = self._pacer.begin + _ANSWER_BY * self._period
            deadline = max(planned, begin + _AT_LEAST * self._period)
        if not self._wait(deadline, self._pending):
            return "the agent has not answered yet"
        pending, self._pending = self._pending, None
        try:
            return pending.result()
        except TRANSIENT as error:
            if not has_fallback:
                raise
            self._summary.last_error = error
            return f"{type(error).__name__}: {error}"

    def _ask(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._limits is None and self.limits is not False:
            self._limits = self.limits or self._limits_of_policy()
        begin = time.monotonic()
        try:
            return self.agent.infer(observation)
        finally:
            self._summary.agent_seconds.append(time.monotonic() - begin)

    def _limits_of_policy(self) -> Limits | None:
        limits = Limits.of_policy(self.agent)
        if limits is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "No limits of this policy's actions are known: its metadata has no action_limits. "
                "Actions are executed as they are. Give Runtime limits=Limits(…), or limits=False."
            )
        return limits

    def _count_hold(self, step: int, reason: str) -> bool:
        """Count a step that was held for a reason; return False if holding has lasted too long."""
        now = time.monotonic()
        held_for = 0.0 if self._hold_start is None else now - self._hold_start
        self._summary.longest_hold = max(self._summary.longest_hold, held_for)
        if not reason:
            self._hold_start = None
            return True
        self._hold_start = now - held_for
        self._summary.num_held += 1
        logger.debug("Holding at step %d: %s", step, reason)
        self._call_hooks("on_hold", step, reason)
        if held_for < self.max_hold:
            return True
        logger.error("Stopped: no new action for %.1f s: %s.", held_for, reason)
        return False

    def _wait_for_next_step(self, step: int) -> None:
        if not self._period or self._pacer is None:
            return
        overrun, num_skipped = self._pacer.advance(time.monotonic())
        if overrun > 0:
            self._summary.num_overruns += 1
            self._summary.worst_overrun = max(self._summary.worst_overrun, overrun)
            self._summary.num_skipped += num_skipped
            self._call_hooks("on_overrun", step, overrun)
        self._wait(self._pacer.begin)

    def _wait(self, deadline: float, future: Future[Any] | None = None) -> bool:
        """Wait until the deadline, a stop, or the future is done; return whether it is."""
        while self._stop is None and not (future and future.done()):
            seconds = min(deadline - time.monotonic(), _CHECK_SECONDS)
            if seconds <= 0:
                break
            if future is None:
                time.sleep(seconds)
            else:
                concurrent.futures.wait([future], seconds)
        return future is not None and future.done()

    def _call_hooks(self, event: str, *args: Any) -> None:
        for hooks in self.hooks:
            getattr(hooks, event)(*args)


def _add_note(error: BaseException, note: str) -> None:
    """Do what `BaseException.add_note` does, which Python has from 3.11 on."""
    vars(error).setdefault("__notes__", []).append(note)

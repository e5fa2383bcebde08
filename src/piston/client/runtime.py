"""The control loop: observe, ask the agent, act, at a fixed rate.

The robot is served first. The agent is asked in a background thread and has most of a period to
answer; where it does not, or the server is away, the last action is held and the loop goes on,
until the agent answers or `max_hold` is over. It knows neither chunks nor sockets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from piston.client.errors import TRANSIENT
from piston.client.interfaces import Agent, Environment, Hooks
from piston.client.timing import EndedBy, Pacer, Record, Summary
from piston.client.worker import Worker

logger = logging.getLogger(__name__)

# The part of a period after which an answer is too late for its step; and the part that the agent
# has at least, where the step began late itself.
_ANSWER_BY, _AT_LEAST = 0.9, 0.5
# How often a long wait looks whether it is to stop.
_GLANCE_SECONDS = 0.1

SafeAction = Callable[[Mapping[str, Any], np.ndarray | None], np.ndarray]


class Runtime:
    """`Runtime(robot, ActionChunkBroker(Client(…), 25), control_hz=50).run()`

    With `control_hz=None` each step waits for the agent and nothing is paced: for simulations.
    `safe_action(observation, last_action)` says what to do while there is no new action; by default
    the last one is repeated, which is right for positions. For velocities give zeros. `max_hold` is
    in seconds; after it the run ends (`ended_by == "held"`). Ctrl-C ends after the current step.
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
    ) -> None:
        if control_hz is not None and control_hz <= 0:
            raise ValueError(f"control_hz is positive, or None for no pacing; found {control_hz}.")
        self._environment = environment
        self._agent = agent
        self._period = None if control_hz is None else 1 / control_hz
        self._hooks = tuple(hooks)
        self._num_episodes = num_episodes
        self._max_steps = max_steps
        self._max_hold = max_hold
        self._safe_action = safe_action
        self._worker = Worker("piston agent")
        # Plain, not an Event: a signal handler that takes an Event's lock may wait for itself.
        self._stop: EndedBy | None = None
        self._record = Record()
        # Of the episode.
        self._pacer: Pacer | None = None
        self._last_action: np.ndarray | None = None
        self._pending: Future[Mapping[str, Any]] | None = None
        self._hold_start: float | None = None
        self._hold_reason = ""

    def stop(self) -> None:
        """End after the current step; from a hook or another thread."""
        self._stop = "stopped"

    def run(self) -> Summary:
        """All episodes. An error of the agent that will not pass ends the run and is raised."""
        self._stop = None
        self._record = Record()
        ended_by: EndedBy = "error"
        with self._interruptible():
            try:
                self._tell("on_start")
                for episode in range(self._num_episodes):
                    ended_by = "error"
                    ended_by = self._run_episode(episode)
                    if ended_by not in ("done", "max_steps"):
                        break
            finally:
                summary = self._record.summary(ended_by)
                self._tell("on_end", summary)
        return summary

    def _run_episode(self, episode: int) -> EndedBy:
        self._environment.reset()
        self._reset_agent()
        self._pacer = self._last_action = self._hold_start = None
        self._tell("on_episode_start", episode)
        ended_by: EndedBy = "error"
        try:
            ended_by = self._run_steps()
        finally:
            self._record.end_episode()
            self._tell("on_episode_end", episode, ended_by)
        return ended_by

    def _reset_agent(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        # In the worker, after whatever the agent is still doing for the last episode.
        reset = self._worker.submit(self._agent.reset)
        if self._wait(reset):
            reset.result()

    def _run_steps(self) -> EndedBy:
        step = 0
        while True:
            if self._stop is not None:
                return self._stop
            if self._environment.is_done():
                return "done"
            if step == self._max_steps:
                return "max_steps"
            if not self._run_step(step):
                return self._stop or "held"
            self._end_step(step)
            step += 1

    def _run_step(self, step: int) -> bool:
        """Observe, ask, act. False: end here."""
        begin = time.monotonic()
        observation = self._environment.get_observation()
        self._tell("on_observation", step, observation)
        has_fallback = self._last_action is not None or self._safe_action is not None
        if self._pacer is None and has_fallback:
            self._start_clock(begin)
        result = self._answer(observation, begin, has_fallback)
        if self._pacer is None:
            # The first answer may take long (a model warms up); the rate counts from here.
            begin = time.monotonic()
            self._start_clock(begin)
        if self._stop is not None:
            return False
        is_held = result is None or bool(result.get("held"))
        if result is not None and is_held:
            self._hold_reason = "the agent holds its last action"
        action = self._choose(observation, result, is_held)
        # A copy: what is held must not change with what the robot does to its own.
        self._last_action = action.copy()
        self._environment.apply_action(action)
        self._tell("on_action", step, action, None if is_held else result)
        self._record.add_step(begin)
        return self._note_hold(step, is_held)

    def _start_clock(self, now: float) -> None:
        self._record.begin_episode(now)
        self._pacer = Pacer(self._period or 0.0, start=now)

    def _answer(
        self, observation: Mapping[str, Any], begin: float, has_fallback: bool
    ) -> Mapping[str, Any] | None:
        """The agent's result; None where it is late or the server is away."""
        if self._pending is None:
            self._pending = self._worker.submit(self._ask, observation)
        deadline = None
        if self._period is not None and self._pacer is not None:
            planned = self._pacer.begin + _ANSWER_BY * self._period
            deadline = max(planned, begin + _AT_LEAST * self._period)
        if not self._wait(self._pending, deadline):
            self._hold_reason = "the agent has not answered yet"
            return None
        pending, self._pending = self._pending, None
        try:
            return pending.result()
        except TRANSIENT as error:
            if not has_fallback:
                raise
            self._record.last_error = error
            self._hold_reason = f"{type(error).__name__}: {error}"
            return None

    def _ask(self, observation: Mapping[str, Any]) -> Mapping[str, Any]:
        begin = time.monotonic()
        try:
            return self._agent.infer(observation)
        finally:
            self._record.agent_seconds.append(time.monotonic() - begin)

    def _choose(
        self, observation: Mapping[str, Any], result: Mapping[str, Any] | None, is_held: bool
    ) -> np.ndarray:
        if is_held and self._safe_action is not None:
            return np.asarray(self._safe_action(observation, self._last_action))
        if result is not None:
            return _single_action(result)
        assert self._last_action is not None, "without a fallback the first answer is waited for"
        return self._last_action.copy()

    def _note_hold(self, step: int, is_held: bool) -> bool:
        """Count a held step; False when it has lasted too long."""
        now = time.monotonic()
        if self._hold_start is not None:
            self._record.longest_hold = max(self._record.longest_hold, now - self._hold_start)
        if not is_held:
            self._hold_start = None
            return True
        self._record.num_held += 1
        if self._hold_start is None:
            self._hold_start = now
        logger.debug("Holding at step %d: %s", step, self._hold_reason)
        self._tell("on_hold", step, self._hold_reason)
        held_for = now - self._hold_start
        if held_for < self._max_hold:
            return True
        logger.error("Stopped: no new action for %.1f s: %s.", held_for, self._hold_reason)
        return False

    def _end_step(self, step: int) -> None:
        """Wait for the next step's time."""
        if self._period is None or self._pacer is None:
            return
        overrun = self._pacer.advance()
        if overrun > 0:
            self._record.add_overrun(overrun, self._pacer.take_skipped())
            self._tell("on_overrun", step, overrun)
        while (left := self._pacer.begin - time.monotonic()) > 0 and self._stop is None:
            time.sleep(min(left, _GLANCE_SECONDS))

    def _wait(self, future: Future[Any], deadline: float | None = None) -> bool:
        """Whether it is done, at the deadline or when the run is to stop."""
        while not future.done() and self._stop is None:
            left = _GLANCE_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            concurrent.futures.wait([future], timeout=min(left, _GLANCE_SECONDS))
        return future.done()

    def _tell(self, event: str, *args: Any) -> None:
        for hooks in self._hooks:
            getattr(hooks, event)(*args)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends the run after the step, a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: Any) -> None:
            if self._stop == "interrupted":
                raise KeyboardInterrupt
            self._stop = "interrupted"

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous or signal.SIG_DFL)


def _single_action(result: Mapping[str, Any]) -> np.ndarray:
    action = np.asarray(result["actions"])
    if action.ndim != 1:
        raise ValueError(
            f"The agent's actions have shape {action.shape}; expected one action (dim,). Wrap a "
            "policy that gives chunks, such as a Client, in a broker."
        )
    if not np.isfinite(action).all():
        raise ValueError(f"The agent's action is not finite: {action}. It is not executed.")
    return action

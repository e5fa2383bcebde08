"""A policy: observations in the robot's own keys in, its own actions out.

The input transforms of an inference pipeline; the model; then the output transforms. A model that
was trained with text also returns the `subtask` that it is in, or goes on with one that a request
gives, and answers a `question`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from piston import weights
from piston.config import DataConfig, UnknownRobot
from piston.inference.candidates import choose_candidate, uncertainty
from piston.inference.compiled import GraphEngine
from piston.inference.subtasks import SubtaskInterval, SubtaskMemory
from piston.models.flow import Pi0
from piston.models.integrator import Committed, Guidance, Jacobian, guidance_weights
from piston.models.language import END_ID, PADDING_ID
from piston.models.model import ActOptions, Model
from piston.observation import Observation, stack_samples
from piston.transforms import Data, compose
from piston.transforms.prompts import TokenizePrompt

# Keys of a request besides the robot's own.
REQUEST_KEYS = ("noise", "seed", "rtc", "robot", "session", "executed_steps")
_RTC_STEPS = ("delay", "execute_horizon")
# Inferences of one size are repeated until they have taken so long together.
_SECONDS_TO_MEASURE = 0.5

logger = logging.getLogger(__name__)


class PreparedObservation(Mapping[str, Any]):
    """An observation that can be read as before, and the model's input that was made from it.

    It is read only. A copy, such as `{**observation, "prompt": "…"}`, is not prepared any more.
    """

    def __init__(
        self,
        observation: Mapping[str, Any],
        inputs: Data,
        policy: Policy,
        subtask: str | None = None,
    ) -> None:
        # `subtask` is the one to go on with; None: the model writes it.
        self.inputs, self.policy, self.subtask = inputs, policy, subtask
        self._observation = observation

    def __getitem__(self, key: str) -> Any:
        return self._observation[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._observation)

    def __len__(self) -> int:
        return len(self._observation)


class Policy:
    """Give it a model and the pipeline it was trained with (`data`, with its statistics)."""

    def __init__(
        self,
        model: Model,
        data: DataConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        candidates: int = 1,
        seed: int | None = None,
        rtc_jacobian: Jacobian = "full",
        subtask_interval: str | int = "1",
        engine: GraphEngine | None = None,
    ) -> None:
        """`engine` computes actions in place of the model, for the same number of steps."""
        defaults = {"num_steps": None, "candidates": 1}
        for name, count in (("num_steps", num_steps), ("candidates", candidates)):
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, is {count!r}.")
            if not model.config.denoises and count != defaults[name]:
                raise ValueError(
                    f"{name} is {count}, but {model.config.family} does not denoise: leave it out."
                )
        if rtc_jacobian not in get_args(Jacobian):
            raise ValueError(f"rtc_jacobian is {rtc_jacobian!r}; it is {get_args(Jacobian)}.")
        if engine is not None and candidates > 1:
            raise ValueError(
                f"candidates is {candidates}, but compiled graphs compute one chunk per request. "
                "Leave out --candidates, or serve the checkpoint without compiling it."
            )
        if engine is not None and num_steps not in (None, engine.num_steps):
            raise ValueError(
                f"num_steps is {num_steps}, but the policy is compiled for {engine.num_steps}."
            )
        self.model = model.eval()
        self._engine = engine
        self.data = data
        # By default as many steps as the model was made for.
        self.num_steps = engine.num_steps if engine else num_steps or model.config.num_steps
        self._candidates = candidates
        self._jacobian: Jacobian = rtc_jacobian
        # Of a chunk, in the robot's steps.
        self._horizon = data.steps_read(model.config.action_horizon)
        about = dict(data.robot_metadata)
        if "actions" in about:
            actions: Mapping[str, Any] = about["actions"]
            about["actions"] = {**actions, "shape": [self._horizon, *actions["shape"]]}
        # The robot's name: in the mixture that it was trained with, else that of its table.
        self.robot = data.entry or about.get("robot")
        about |= {"subtasks": True} if data.subtasks else {}
        about |= {"rtc": self._rtc_metadata()}
        self.metadata = {**about, **(metadata or {})}
        self._subtasks = SubtaskMemory(SubtaskInterval.parse(str(subtask_interval)))
        words = (one for one in data.model_transforms.inputs if isinstance(one, TokenizePrompt))
        self._words = next(words, None)
        self._to_model = compose(data.input_transforms(training=False))
        self._to_robot = compose(data.output_transforms())
        self._random = np.random.default_rng(seed)

    @property
    def num_parameters(self) -> int:
        """How many the model has, in whatever form its weights are held."""
        model = weights.build_on_meta(self.model.config)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def _max_delay(self) -> int:
        """The largest delay that the model was trained with, in control steps; 0: none.

        The last of the committed actions has to be one of the model's, not one between two.
        """
        actions = self.model.config.max_delay
        return (actions - 1) * self.data.action_stride + 1 if actions else 0

    def _rtc_metadata(self) -> dict[str, Any]:
        """Return what a client has to know to ask for real-time chunking."""
        can_guide = self._engine is None or self._engine.has_model
        kinds = ["guided"] if self.model.config.denoises and can_guide else []
        if not self._max_delay:
            return {"kinds": kinds}
        return {"kinds": ["trained", *kinds], "max_delay": self._max_delay}

    @property
    def has_sessions(self) -> bool:
        """Whether requests of one robot depend on each other: it may go on with its subtask."""
        return self.data.subtasks

    @property
    def device(self) -> torch.device:
        if self._engine is not None:
            return self._engine.device
        return next(self.model.parameters()).device

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """A chunk of actions, and how long it took after the device had finished.

        Explicit `noise` (horizon, action dim; in the model's space) or a `seed` make the result
        reproducible.
        """
        given = {"noise": noise, "seed": seed}
        request = {**observation, **{key: v for key, v in given.items() if v is not None}}
        return self.infer_batch([request])[0]

    def infer_batch(self, observations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answer several observations at once; each may contain its own noise or seed.

        Those that `prepare` returned are not prepared again.
        """
        started = time.perf_counter()
        prepared = [
            one
            # One that another robot's policy prepared for the same model may be in the batch.
            if isinstance(one, PreparedObservation) and one.policy.model is self.model
            else self.prepare(one)
            for one in observations
        ]
        results: list[dict[str, Any]] = [{} for _ in prepared]
        # The kinds of requests differ in what is computed, so each kind is one batch.
        for run in (self._act, self._act_guided, self._answer):
            places = [i for i, one in enumerate(prepared) if self._runs(one) == run]
            if places:
                chosen = run([prepared[i] for i in places])
                for place, result in zip(places, chosen, strict=True):
                    results[place] = result
        elapsed = 1_000 * (time.perf_counter() - started)
        return [{**result, "policy_timing": {"infer_ms": elapsed}} for result in results]

    def _runs(self, prepared: PreparedObservation) -> Callable[..., list[dict[str, Any]]]:
        """Return the method that answers a request."""
        if prepared.get("question") is not None:
            return self._answer
        is_guided = prepared.inputs.get("rtc", {}).get("kind") == "guided"
        return self._act_guided if is_guided else self._act

    def warm_up(self) -> float:
        """Run once on a black image, so that the first robot does not wait; return the seconds.

        A compiled policy compiles everything that it will need.
        """
        return self._seconds_of_batch(1) if self._engine is None else self._engine.warm_up()

    def best_batch(self, most: int) -> int:
        """Measure how many requests should share one inference: at most so many.

        The number is doubled as long as this makes a request at least 5 % cheaper and fits into
        memory: otherwise the first robot would wait for the others, and nobody would gain. Not
        measured are graphs, which were compiled for a number that somebody chose, and models that
        write: how much they write depends on the request, and every token gains from company.
        """
        if self._engine is not None:
            return min(most, self._engine.buckets.batches[-1])
        if not self.model.config.denoises or "text" in self.model.config.targets:
            return most
        best, cost = 1, self._seconds_of_batch(1)
        while 2 * best <= most:
            try:
                doubled = self._seconds_of_batch(2 * best) / (2 * best)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            if doubled > 0.95 * cost:
                break
            best, cost = 2 * best, doubled
        logger.info("Requests that share one inference: at most %d, %.3g s each.", best, cost)
        return best

    def _seconds_of_batch(self, size: int) -> float:
        """Return how long black images take: the shortest inference, of several if they are short.

        The first one of a size may take longer than others.
        """
        config, pixels = self.model.config, self.model.config.image_size
        black = torch.zeros(size, pixels, pixels, 3, dtype=torch.uint8)
        words = torch.full((size, config.prompt_length), 2)
        present = torch.ones(size, dtype=torch.bool)
        observation = Observation(
            images=dict.fromkeys(config.cameras, black),
            image_masks=dict.fromkeys(config.cameras, present),
            state=torch.zeros(size, config.action_dim),
            tokenized_prompt=words,
            tokenized_prompt_mask=words > 0,
            writes_text=~present,
        ).to(self.device)
        noise = None
        if self._candidates > 1:
            noise = self.model.draw(size, self._candidates)["noise"].to(self.device)
        seconds: list[float] = []
        while sum(seconds) < _SECONDS_TO_MEASURE:
            started = time.perf_counter()
            # Two tokens of a model that writes them: it may write very many for a black image.
            self.model.act(observation, noise, num_steps=self.num_steps or 2)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def prepare(self, observation: Mapping[str, Any]) -> PreparedObservation:
        """Return the observation with the model's input, and the noise that it starts from.

        Raises ValueError or LookupError if the observation is wrong.
        """
        ignored = (*REQUEST_KEYS, "answer")  # the model's to give
        data = {key: value for key, value in observation.items() if key not in ignored}
        if np.ndim(data.get("state", ())) > 1:
            raise ValueError("An observation is of one robot; its state has a batch axis.")
        asking = observation.get("robot")
        if asking is not None and str(asking).lower() != str(self.robot).lower():
            raise UnknownRobot(
                f"The request is of robot {asking!r}; this policy drives {self.robot}."
            )
        is_question = data.get("question") is not None
        if is_question and self.data.question_slot is None:
            raise ValueError(
                "This policy answers no questions: it was not trained on pictures with questions."
            )
        given = self._given_subtask(observation)
        data = {key: value for key, value in data.items() if key != "subtask"}
        data |= {} if given is None else {"subtask": given}
        rtc = observation.get("rtc")
        if rtc is not None:
            previous, rtc = self._checked_rtc(rtc)
            # Its last action is repeated to the length of a chunk. As actions of this observation
            # it passes through the same transforms as recorded ones, so that delta actions become
            # relative to the new state.
            padding = np.repeat(previous[-1:], self._horizon - len(previous), axis=0)
            data["actions"] = np.concatenate([previous, padding])
        seen = self._to_model(data)
        if is_question:
            seen["image_mask"] = self._only_question_slot(seen["image_mask"])
        previous = seen.pop("actions", None)
        if rtc is not None:
            seen["rtc"] = {**rtc, "previous_chunk": previous}
        if self.model.config.denoises:
            seen["noise"] = self._noise(observation)
        return PreparedObservation(observation, seen, self, given)

    def _only_question_slot(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """Return which cameras a question is about: the one that showed pictures in training."""
        slot = self.data.question_slot or ""
        if not present.get(slot):
            raise ValueError(
                f"A question is about the picture in the camera slot {slot!r}, which the "
                "observation does not have. Send that camera."
            )
        return {name: np.bool_(name == slot) for name in present}

    def _given_subtask(self, observation: Mapping[str, Any]) -> Any:
        """Return the subtask of a request, or the one that its session goes on with, or None."""
        given = observation.get("subtask")
        if given is not None and not (isinstance(given, str) and not given.strip()):
            if not self.data.subtasks:
                raise ValueError(
                    f"The request gives the subtask {repr(given)[:40]} to a policy that has no "
                    "subtasks. Leave it out, or put it into the prompt."
                )
            return given
        if not self.data.subtasks or observation.get("question") is not None:
            return None
        return self._subtasks.recall(_session(observation), str(observation.get("prompt")))

    def _checked_rtc(self, rtc: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the parts of a real-time request: the old chunk from now on, kind and counts."""
        kinds = self._rtc_metadata()["kinds"]
        if not kinds:
            raise ValueError(
                "Real-time chunking needs a flow model, and for a compiled file one that was "
                f"trained with --max-delay; this is {self.model.config.family}."
            )
        expected = {"previous_chunk", *_RTC_STEPS}
        if not isinstance(rtc, Mapping) or not expected <= rtc.keys():
            found = f"a dictionary of {sorted(rtc)}" if isinstance(rtc, Mapping) else repr(rtc)[:40]
            raise ValueError(f"rtc is {found}; expected {', '.join(sorted(expected))}.")
        steps = {key: _whole_number(rtc[key], f"rtc.{key}") for key in _RTC_STEPS}
        previous = np.asarray(rtc["previous_chunk"])
        if previous.ndim != 2 or not 1 <= len(previous) <= self._horizon:
            raise ValueError(
                f"rtc.previous_chunk has shape {previous.shape}; expected (steps, action dim) with "
                f"1 to {self._horizon} steps."
            )
        if steps["delay"] > len(previous):
            raise ValueError(
                f"rtc.delay is {steps['delay']} steps, but only {len(previous)} of the old chunk "
                "are left to be committed to."
            )
        kind = rtc.get("kind", kinds[0])
        if kind not in kinds:
            raise ValueError(
                f"rtc.kind is {repr(kind)[:40]}; this checkpoint can be {' or '.join(kinds)}."
                + " Train it with --max-delay for the other." * (kind == "trained")
            )
        if kind == "trained" and steps["delay"] > self._max_delay:
            raise ValueError(
                f"rtc.delay is {steps['delay']} control steps, but the policy was trained with "
                f"delays of at most {self._max_delay} (--max-delay {self.model.config.max_delay}, "
                f"{self.data.action_stride} control steps per action). Make inference faster, ask "
                "with rtc.kind 'guided', or train with larger delays."
            )
        if kind == "guided":
            guidance_weights(self._horizon, **steps)  # refuses numbers that do not fit
        return previous, {**steps, "kind": kind}

    def _noise(self, observation: Mapping[str, Any]) -> np.ndarray:
        chunk = (self.model.config.action_horizon, self.model.config.action_dim)
        shape = chunk if self._candidates == 1 else (self._candidates, *chunk)
        if observation.get("noise") is not None:
            noise = np.asarray(observation["noise"])
            numbers = np.issubdtype(noise.dtype, np.number)
            if not numbers or noise.shape != shape or not np.isfinite(noise).all():
                raise ValueError(
                    f"noise is {noise.dtype} of shape {noise.shape}; expected {shape}, all finite."
                )
            return noise.astype(np.float32)
        seed = observation.get("seed")
        own = None if seed is None else np.random.default_rng(_whole_number(seed, "seed"))
        return (own or self._random).standard_normal(shape, np.float32)

    def _act(
        self, prepared: Sequence[PreparedObservation], guidance: Guidance | None = None
    ) -> list[dict[str, Any]]:
        if self.model.config.denoises:
            noise = self._tensor([one.inputs["noise"] for one in prepared])
            options = ActOptions(
                noise,
                num_steps=self.num_steps,
                guidance=guidance,
                committed=self._committed(prepared) if guidance is None else None,
            )
        else:
            options = ActOptions()
        with torch.no_grad():
            response = (self._engine or self.model).act_with(self._observed(prepared), options)
        actions = response.actions.cpu()  # waits until the device has finished
        paths = [None] * len(prepared) if response.path is None else response.path.cpu().unbind(1)
        texts = [None] * len(prepared) if response.text is None else response.text.tolist()
        return [
            {**one.policy._result(one, chunk, path), **one.policy._subtask(one, text)}
            for one, chunk, path, text in zip(prepared, actions, paths, texts, strict=True)
        ]

    def _result(
        self, prepared: PreparedObservation, chunk: Tensor, path: Tensor | None
    ) -> dict[str, Any]:
        """Return the robot's actions for a chunk or the best of several, and their uncertainty."""
        about = {}
        if path is not None:
            stats = (self.data.norm_stats or {}).get("actions")
            path = path if path.ndim == 4 else path[:, None]
            path = path if stats is None else path[..., : stats.dim]
            found = uncertainty(path)
            about = {"uncertainty": found} if found else {}
            if chunk.ndim == 3:
                chunk = chunk[choose_candidate(path[-1])]
        return {**self.to_robot(prepared.inputs, chunk.numpy()), **about}

    def _committed(self, prepared: Sequence[PreparedObservation]) -> Committed | None:
        """Return the first actions that requests continue; None if no request does."""
        requests: list[Mapping[str, Any] | None] = [one.inputs.get("rtc") for one in prepared]
        if not any(requests):
            return None
        config = self.model.config
        plain = np.zeros((config.action_horizon, config.action_dim))
        chosen = [rtc or {"delay": 0, "previous_chunk": plain} for rtc in requests]
        delays = [
            _num_committed(rtc["delay"], one.policy.data.action_stride)
            for rtc, one in zip(chosen, prepared)
        ]
        steps = torch.arange(config.action_horizon) < torch.tensor(delays)[:, None]
        previous = self._tensor([rtc["previous_chunk"] for rtc in chosen])
        return Committed(previous, steps.to(self.device))

    def _act_guided(self, prepared: Sequence[PreparedObservation]) -> list[dict[str, Any]]:
        return self._act(prepared, self._guidance(prepared))

    def _answer(self, prepared: Sequence[PreparedObservation]) -> list[dict[str, Any]]:
        """Return the answers to questions; nothing is denoised."""
        assert isinstance(self.model, Pi0)
        with torch.no_grad():
            _, text = self.model.respond(self._observed(prepared))
        assert text is not None
        return [{"answer": self._decoded(tokens)} for tokens in text.tolist()]

    def _observed(self, prepared: Sequence[PreparedObservation]) -> Observation:
        others = ("noise", "rtc")
        seen = [{k: v for k, v in one.inputs.items() if k not in others} for one in prepared]
        return Observation.from_dict(stack_samples(seen)).to(self.device)

    def _subtask(
        self, prepared: PreparedObservation, tokens: Sequence[int] | None
    ) -> dict[str, str]:
        """Return the subtask of a result, written or given; a written one is remembered."""
        if not self.data.subtasks:
            return {}
        if prepared.subtask is not None:
            return {"subtask": prepared.subtask}
        text = self._decoded(tokens or ())
        # A text that ran into its limit cannot be given again; the next chunk writes another.
        if text and self._fits(text):
            self._subtasks.store(_session(prepared), str(prepared.get("prompt")), text)
        return {"subtask": text}

    def _fits(self, text: str) -> bool:
        assert self._words is not None
        assert self._words.response is not None
        return len(self._words.tokenizer.encode(text)) < self._words.response.max_text_len

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self._words is not None
        words = itertools.takewhile(lambda token: token not in (PADDING_ID, END_ID), tokens)
        return self._words.tokenizer.decode(list(words)).strip()

    def to_robot(self, prepared: Data, chunk: np.ndarray) -> dict[str, Any]:
        """Return what the robot gets for a chunk of the model, or for its tokens."""
        return dict(self._to_robot({"state": prepared["state"], "actions": chunk}))

    def _guidance(self, prepared: Sequence[PreparedObservation]) -> Guidance:
        requests = [one.inputs["rtc"] for one in prepared]
        horizon = self.model.config.action_horizon
        # In the model's steps, of which one may be several of the robot's.
        strides = [one.policy.data.action_stride for one in prepared]
        weights = []
        for rtc, stride in zip(requests, strides):
            executed = -(-rtc["execute_horizon"] // stride)
            delay = min(_num_committed(rtc["delay"], stride), horizon - executed)
            weights.append(guidance_weights(horizon, delay, executed))
        return Guidance(
            previous=self._tensor([rtc["previous_chunk"] for rtc in requests]),
            weights=torch.stack(weights).to(self.device),
            jacobian=self._jacobian,
        )

    def _tensor(self, rows: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows).astype(np.float32)).to(self.device)


def _num_committed(delay: int, stride: int) -> int:
    """Return how many of the model's actions are committed if `delay` of the robot's are.

    One of the model's is `stride` of the robot's, and those between two are interpolated: the
    model's first action that is not before the last committed one is committed as well.
    """
    return 0 if delay == 0 else -(-(delay - 1) // stride) + 1


def _session(observation: Mapping[str, Any]) -> Hashable:
    """Return whose subtask a request goes on with; a server adds the connection to it."""
    session = observation.get("session")
    own = session[-1] if isinstance(session, tuple) else session
    if not isinstance(own, str | int | None):
        raise ValueError(f"session is {repr(own)[:40]}; expected a number or a text.")
    return session


def _whole_number(value: Any, name: str) -> int:
    number = np.asarray(value)
    if number.ndim or not np.issubdtype(number.dtype, np.integer) or number < 0:
        raise ValueError(f"{name} is {repr(value)[:40]}; expected a whole number, 0 or more.")
    return int(number)

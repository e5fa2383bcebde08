"""One robot's pipeline: from its observation to a row of a batch, and from the model's output back.

A `Policy` has one for each of its robots. It holds everything that differs between robots behind
one model: transforms with their statistics, the subtasks of its sessions, its noise, its metadata.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from piston.config import DataConfig
from piston.inference.candidates import choose_candidate, uncertainty
from piston.inference.rtc import RealTimeChunking, whole_number
from piston.inference.runner import ModelOutput, ModelRequest, Runner
from piston.inference.subtasks import SubtaskInterval, SubtaskMemory
from piston.models.language import END_ID, PADDING_ID
from piston.transforms import Data, compose
from piston.transforms.prompts import TokenizePrompt

# Keys of a request besides the robot's own.
REQUEST_KEYS = ("noise", "seed", "rtc", "robot", "session", "executed_steps")
# Keys that no transform gets: those, and what the pipeline passes on itself or the model gives.
_NOT_OBSERVED = (*REQUEST_KEYS, "subtask", "answer")


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedRequest(ModelRequest):
    """A request after all checks and transforms: a row of a batch, and how to reply to it."""

    pipeline: RobotPipeline
    # As it arrived.
    observation: Mapping[str, Any]
    # The subtask to go on with; None: the model writes it, if it has subtasks.
    subtask: str | None
    # Whose subtask a written one is.
    session: Hashable


class RobotPipeline:
    """Prepares one robot's requests for a runner, and replies to them."""

    def __init__(
        self,
        data: DataConfig,
        runner: Runner,
        *,
        metadata: Mapping[str, Any] | None = None,
        seed: int | None = None,
        subtask_interval: str | int = "1",
    ) -> None:
        """`data` is the pipeline that the model was trained with, with its statistics."""
        self.data = data
        config = runner.model.config
        self._noise_shape = runner.noise_shape if config.denoises else None
        self._rtc = RealTimeChunking(config, data, can_guide=runner.can_guide)
        about = dict(data.robot_metadata)
        if "actions" in about:
            actions: Mapping[str, Any] = about["actions"]
            shape = [data.steps_read(config.action_horizon), *actions["shape"]]
            about["actions"] = {**actions, "shape": shape}
        # The robot's name: in the mixture that it was trained with, else that of its table.
        self.robot = data.entry or about.get("robot")
        about |= {"subtasks": True} if data.subtasks else {}
        self.metadata = {**about, "rtc": self._rtc.metadata, **(metadata or {})}
        self._subtasks = SubtaskMemory(SubtaskInterval.parse(str(subtask_interval)))
        transforms = data.model_transforms.inputs
        self._prompts = next((t for t in transforms if isinstance(t, TokenizePrompt)), None)
        self._to_model = compose(data.input_transforms(training=False))
        self._to_robot = compose(data.output_transforms())
        self._random = np.random.default_rng(seed)

    def prepare(self, observation: Mapping[str, Any]) -> PreparedRequest:
        """Return the row of a batch for an observation.

        Raises ValueError or LookupError if the observation is wrong.
        """
        data = {key: value for key, value in observation.items() if key not in _NOT_OBSERVED}
        if np.ndim(data.get("state", ())) > 1:
            raise ValueError("An observation is of one robot; its state has a batch axis.")
        is_question = data.get("question") is not None
        if is_question and self.data.question_slot is None:
            raise ValueError(
                "This policy answers no questions: it was not trained on pictures with questions."
            )
        subtask, session = self._subtask_of(observation, is_question)
        if subtask is not None:
            data["subtask"] = subtask
        rtc = None if observation.get("rtc") is None else self._rtc.parse(observation["rtc"])
        if rtc is not None:
            # As actions of this observation, the old chunk passes through the same transforms as
            # recorded ones, so that delta actions become relative to the new state.
            data["actions"] = rtc.previous_chunk
        inputs = self._to_model(data)
        if is_question:
            inputs["image_mask"] = self._only_question_slot(inputs["image_mask"])
        previous = inputs.pop("actions", None)
        if rtc is not None:
            rtc = dataclasses.replace(rtc, previous_chunk=previous)
        return PreparedRequest(
            inputs=inputs,
            noise=None if self._noise_shape is None else self._noise(observation),
            rtc=rtc,
            is_question=is_question,
            pipeline=self,
            observation=observation,
            subtask=subtask,
            session=session,
        )

    def reply(self, request: PreparedRequest, output: ModelOutput) -> dict[str, Any]:
        """Return the answer to a question; else actions, their uncertainty and the subtask."""
        if output.actions is None:
            return {"answer": self._decode(output.text or ())}
        chunk, about = output.actions, {}
        if output.path is not None:
            stats = (self.data.norm_stats or {}).get("actions")
            path = output.path if output.path.ndim == 4 else output.path[:, None]
            path = path if stats is None else path[..., : stats.dim]
            found = uncertainty(path)
            about = {"uncertainty": found} if found else {}
            if chunk.ndim == 3:
                chunk = chunk[choose_candidate(path[-1])]
        actions = self.to_robot(request.inputs, chunk.numpy())
        return {**actions, **about, **self._subtask_reply(request, output.text)}

    def to_robot(self, inputs: Data, chunk: np.ndarray) -> dict[str, Any]:
        """Return what the robot gets for a chunk of the model, or for its tokens."""
        return dict(self._to_robot({"state": inputs["state"], "actions": chunk}))

    def _only_question_slot(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """Return which cameras a question is about: the one that showed pictures in training."""
        slot = self.data.question_slot or ""
        if not present.get(slot):
            raise ValueError(
                f"A question is about the picture in the camera slot {slot!r}, which the "
                "observation does not have. Send that camera."
            )
        return {name: np.bool_(name == slot) for name in present}

    def _subtask_of(
        self, observation: Mapping[str, Any], is_question: bool
    ) -> tuple[Any, Hashable]:
        """Return the subtask that a request gives or its session goes on with, and the session."""
        given = observation.get("subtask")
        if given is not None and not (isinstance(given, str) and not given.strip()):
            if not self.data.subtasks:
                raise ValueError(
                    f"The request gives the subtask {repr(given)[:40]} to a policy that has no "
                    "subtasks. Leave it out, or put it into the prompt."
                )
            return given, None
        if not self.data.subtasks or is_question:
            return None, None
        session = observation.get("session")
        # A server adds the connection to it.
        own = session[-1] if isinstance(session, tuple) else session
        if not isinstance(own, str | int | None):
            raise ValueError(f"session is {repr(own)[:40]}; expected a number or a text.")
        return self._subtasks.recall(session, str(observation.get("prompt"))), session

    def _noise(self, observation: Mapping[str, Any]) -> np.ndarray:
        shape = self._noise_shape
        if observation.get("noise") is not None:
            noise = np.asarray(observation["noise"])
            if not np.issubdtype(noise.dtype, np.number) or noise.shape != shape:
                raise ValueError(
                    f"noise is {noise.dtype} of shape {noise.shape}; expected {shape}."
                )
            return noise.astype(np.float32)
        seed = observation.get("seed")
        random = self._random if seed is None else np.random.default_rng(whole_number(seed, "seed"))
        return random.standard_normal(shape, np.float32)

    def _subtask_reply(
        self, request: PreparedRequest, tokens: Sequence[int] | None
    ) -> dict[str, str]:
        """Return the subtask of a reply, written or given; a written one is remembered."""
        if not self.data.subtasks:
            return {}
        if request.subtask is not None:
            return {"subtask": request.subtask}
        text = self._decode(tokens or ())
        # A text that ran into its limit cannot be given again; the next chunk writes another.
        assert self._prompts is not None
        assert self._prompts.response is not None
        num_tokens = len(self._prompts.tokenizer.encode(text))
        if text and num_tokens < self._prompts.response.max_text_len:
            self._subtasks.store(request.session, str(request.observation.get("prompt")), text)
        return {"subtask": text}

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self._prompts is not None
        text = itertools.takewhile(lambda token: token not in (PADDING_ID, END_ID), tokens)
        return self._prompts.tokenizer.decode(list(text)).strip()

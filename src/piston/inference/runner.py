"""The runner: a model, or its compiled graphs, computes batches of prepared requests.

It knows nothing of robots: `RobotPipeline` makes the rows of a batch (`ModelRequest`) and reads
what comes out (`ModelOutput`). All robots of a `Policy` share one runner.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from piston.inference.compiled import GraphEngine
from piston.inference.rtc import Continuation
from piston.models.build import build_on_meta
from piston.models.flow import Pi0
from piston.models.integrator import Committed, Guidance, Jacobian
from piston.models.model import ActOptions, Model
from piston.observation import Observation, stack_samples
from piston.transforms import Data

# Inferences of one size are repeated until they have taken so long together.
_SECONDS_TO_MEASURE = 0.5

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelRequest:
    """One row of a batch."""

    # Images, state and prompt, as the transforms of the model give them.
    inputs: Data
    # What to start from: (h, a), or (n, h, a) of n candidates; None: the model does not denoise.
    noise: np.ndarray | None
    # The chunk to continue; None: a new one.
    rtc: Continuation | None
    # Text is written in place of actions.
    is_question: bool


class ModelOutput(NamedTuple):
    """One row of what the model computed."""

    # In the model's space: (h, a), (n, h, a) of n candidates, or the tokens of actions. None: the
    # answer to a question.
    actions: Tensor | None
    # The noisy actions at the times of the integrator, if the model denoises.
    path: Tensor | None
    # The tokens that the model wrote, if it writes.
    text: Sequence[int] | None


class Runner:
    """Computes batches with one model on one device."""

    def __init__(
        self,
        model: Model,
        *,
        num_steps: int | None = None,
        candidates: int = 1,
        rtc_jacobian: Jacobian = "full",
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
        # By default as many steps as the model was made for.
        self.num_steps = engine.num_steps if engine else num_steps or model.config.num_steps
        # Whether requests can be guided: exported graphs cannot.
        self.can_guide = engine is None or engine.has_model
        self._engine = engine
        self._candidates = candidates
        self._jacobian: Jacobian = rtc_jacobian
        self._chunk = (model.config.action_horizon, model.config.action_dim)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of one request's noise."""
        return self._chunk if self._candidates == 1 else (self._candidates, *self._chunk)

    @property
    def num_parameters(self) -> int:
        """How many the model has, in whatever form its weights are held."""
        model = build_on_meta(self.model.config)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def device(self) -> torch.device:
        if self._engine is not None:
            return self._engine.device
        return next(self.model.parameters()).device

    def run(self, requests: Sequence[ModelRequest]) -> list[ModelOutput]:
        """Compute the rows of a batch, in their order."""
        # The kinds of requests differ in what is computed, so each kind is one batch.
        methods = [self._method_for(request) for request in requests]
        outputs: dict[int, ModelOutput] = {}
        for compute in dict.fromkeys(methods):
            places = [place for place, method in enumerate(methods) if method == compute]
            computed = compute([requests[place] for place in places])
            outputs.update(zip(places, computed, strict=True))
        return [outputs[place] for place in range(len(requests))]

    def _method_for(self, request: ModelRequest) -> Callable[..., list[ModelOutput]]:
        if request.is_question:
            return self._answer
        is_guided = request.rtc is not None and request.rtc.weights is not None
        return self._act_guided if is_guided else self._act_plain

    def _act_plain(self, requests: Sequence[ModelRequest]) -> list[ModelOutput]:
        if not self.model.config.denoises:
            return self._act(requests, ActOptions())
        committed = self._committed(requests)
        return self._act(
            requests, ActOptions(self._noise(requests), self.num_steps, committed=committed)
        )

    def _committed(self, requests: Sequence[ModelRequest]) -> Committed | None:
        """Return the first actions that requests continue; None if no request does."""
        if not any(request.rtc for request in requests):
            return None
        new = Continuation(np.zeros(self._chunk), num_committed=0)
        rows = [request.rtc or new for request in requests]
        lengths = torch.tensor([row.num_committed for row in rows])
        steps = torch.arange(self._chunk[0]) < lengths[:, None]
        return Committed(self._stack([row.previous_chunk for row in rows]), steps.to(self.device))

    def _act_guided(self, requests: Sequence[ModelRequest]) -> list[ModelOutput]:
        rows = [request.rtc for request in requests if request.rtc is not None]
        weights = [row.weights for row in rows if row.weights is not None]
        guidance = Guidance(
            previous=self._stack([row.previous_chunk for row in rows]),
            weights=torch.stack(weights).to(self.device),
            jacobian=self._jacobian,
        )
        return self._act(
            requests, ActOptions(self._noise(requests), self.num_steps, guidance=guidance)
        )

    def _act(self, requests: Sequence[ModelRequest], options: ActOptions) -> list[ModelOutput]:
        observation = self.observe([request.inputs for request in requests])
        with torch.no_grad():
            response = (self._engine or self.model).act_with(observation, options)
        actions = response.actions.cpu()  # waits until the device has finished
        paths = [None] * len(requests) if response.path is None else response.path.cpu().unbind(1)
        texts = [None] * len(requests) if response.text is None else response.text.tolist()
        return [ModelOutput(*row) for row in zip(actions, paths, texts, strict=True)]

    def _answer(self, requests: Sequence[ModelRequest]) -> list[ModelOutput]:
        """Write the answers to questions; nothing is denoised."""
        assert isinstance(self.model, Pi0)
        observation = self.observe([request.inputs for request in requests])
        with torch.no_grad():
            _, text = self.model.respond(observation)
        assert text is not None
        return [ModelOutput(None, None, tokens) for tokens in text.tolist()]

    def observe(self, inputs: Sequence[Data]) -> Observation:
        """Return what the model observes of the inputs of prepared requests."""
        return Observation.from_dict(stack_samples(inputs)).to(self.device)

    def _noise(self, requests: Sequence[ModelRequest]) -> Tensor:
        return self._stack([request.noise for request in requests if request.noise is not None])

    def _stack(self, rows: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(rows).astype(np.float32)).to(self.device)

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
        prompt = torch.full((size, config.prompt_length), 2)
        present = torch.ones(size, dtype=torch.bool)
        observation = Observation(
            images=dict.fromkeys(config.cameras, black),
            image_masks=dict.fromkeys(config.cameras, present),
            state=torch.zeros(size, config.action_dim),
            tokenized_prompt=prompt,
            tokenized_prompt_mask=prompt > 0,
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

"""Inference through two compiled graphs of static shape: prefill, and the whole denoising loop.

Shapes come in buckets: of samples, of cameras, of words. A batch of observations is divided by the
number of present cameras and padded to the smallest bucket that holds it: with black images, and
behind the words of a prompt. All buckets are compiled in `warm_up`; nothing is compiled
later. What the graphs cannot do runs on the model itself, with one log line per kind.

Dims: b batch, h horizon, a action dim, t times of the integrator.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from piston.extras import require_compiler
from piston.inference.packing import Int8Linear
from piston.logs import warn_once
from piston.models import masks
from piston.models.configs import ModelConfig
from piston.models.flow import Pi0
from piston.models.integrator import Committed
from piston.models.model import ActOptions, Model, Response
from piston.models.static import StaticDenoise, StaticPrefill
from piston.observation import Observation, send
from piston.progress import ProgressBar

logger = logging.getLogger(__name__)

_PROMPT_LENGTHS = (16, 32, 48, 64, 128, 200)
# A CUDA graph is recorded in the second run and replayed from the third on.
_RUNS_TO_RECORD = 3
# The mode in which torch raises an error, which names it, for a call that no graph fits.
_NO_GRAPH = "fail_on_recompile"


class Bucket(NamedTuple):
    """The sizes of one pair of graphs."""

    batch: int
    cameras: int
    words: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes for which there are graphs, each in ascending order."""

    batches: tuple[int, ...]
    # Numbers of present cameras: graphs do not depend on which ones these are.
    cameras: tuple[int, ...]
    words: tuple[int, ...]

    @classmethod
    def of(cls, config: ModelConfig, cameras: Iterable[int], max_batch: int) -> Buckets:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, is {max_batch}.")
        powers = (2**power for power in range(max_batch.bit_length()))
        longest = config.prompt_length
        words = (length for length in _PROMPT_LENGTHS if length < longest)
        return cls(tuple(sorted({*powers, max_batch})), tuple(sorted(cameras)), (*words, longest))

    def __iter__(self) -> Iterator[Bucket]:
        return itertools.starmap(Bucket, itertools.product(self.batches, self.cameras, self.words))

    def smallest(self, rows: int, cameras: int, words: int) -> Bucket:
        """Return the smallest bucket that holds so many rows and words."""
        batch = self.batches[bisect.bisect_left(self.batches, rows)]
        return Bucket(batch, cameras, self.words[bisect.bisect_left(self.words, words)])


def camera_counts(robots: Iterable[Mapping[str, Any]], config: ModelConfig) -> set[int]:
    """Return how many cameras the observations of these robots may have.

    `robots` are their `robot_metadata`. A robot that does not describe its observation may send any
    number of the model's cameras.
    """
    counts: set[int] = set()
    for metadata in robots:
        cameras = list(_required_cameras(metadata.get("observation", {})))
        least, most = (sum(cameras), len(cameras)) if cameras else (1, len(config.cameras))
        counts |= set(range(max(least, 1), most + 1))
    return counts


def _required_cameras(entry: Any) -> Iterator[bool]:
    """Return, for each camera in the description of an observation, whether it is required."""
    if isinstance(entry, Mapping):
        if "slot" in entry:
            yield bool(entry.get("required"))
        else:
            yield from itertools.chain.from_iterable(map(_required_cameras, entry.values()))


class Graphs(NamedTuple):
    """Compiled `StaticPrefill` and `StaticDenoise`."""

    prefill: Callable[..., Sequence[Tensor]]
    denoise: Callable[..., Tensor]


def refuse_to_compile(model: Model) -> None:
    """Raise ValueError for models of which no request would run in the graphs."""
    family, advice = model.config.family, "Serve the checkpoint without compiling it."
    if not isinstance(model, Pi0):
        raise ValueError(
            f"{family} writes actions token by token, which has no graph of static shape; π0 and "
            f"π0.5 have one. {advice}"
        )
    if "text" in model.config.targets:
        raise ValueError(
            f"This {family} was trained to write text before its actions (model.targets has text), "
            f"which has no graph of static shape. {advice}"
        )
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError(
            "The weights are held in int8, whose products are not compiled. Use float32 or "
            "bfloat16."
        )


def usual_steps(model: Model) -> int:
    """Return how many denoising steps the model was made for."""
    refuse_to_compile(model)
    assert model.config.num_steps is not None
    return model.config.num_steps


def compile_graphs(
    model: Model, num_steps: int, backend: str | Callable[..., Any] = "inductor"
) -> Graphs:
    """Return graphs that are compiled when they are first called with a shape."""
    refuse_to_compile(model)
    assert isinstance(model, Pi0)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
    if backend == "inductor":
        require_compiler("A compiled policy")
        if next(model.parameters()).device.type == "cuda":
            options["mode"] = "reduce-overhead"  # CUDA graphs
    parts: list[nn.Module] = [StaticPrefill(model), StaticDenoise(model, num_steps)]
    prefill, denoise = (torch.compile(part.eval(), **options) for part in parts)
    return Graphs(prefill, denoise)


class GraphEngine:
    """Computes actions as `Model.act_with` does, through graphs where they can."""

    def __init__(
        self,
        model: Model,
        graphs: Graphs,
        buckets: Buckets,
        num_steps: int,
        *,
        device: torch.device,
        ahead_of_time: bool = False,
    ) -> None:
        """`ahead_of_time` says that the graphs were compiled before, and that `model` is empty."""
        self.config, self.device = model.config, device
        self.buckets, self.num_steps = buckets, num_steps
        self._model, self._graphs, self._ahead_of_time = model, graphs, ahead_of_time
        self._is_warm = False

    @property
    def has_model(self) -> bool:
        """Whether what the graphs cannot do runs on the model."""
        return not self._ahead_of_time

    @torch.no_grad()
    def warm_up(self) -> float:
        """Compile the graphs of all buckets, and return the seconds that it took."""
        started = time.perf_counter()
        buckets = list(self.buckets)
        if self._ahead_of_time:
            buckets = buckets[-1:]  # one graph for all of them, to be loaded and tried
        sizes = {(one.batch, self._num_tokens(one)) for one in buckets}
        runs = _RUNS_TO_RECORD if self.device.type == "cuda" else 1
        # By default torch gives up after eight shapes of one function.
        limits = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
        with (
            ProgressBar("compiling", "shapes", len(buckets)) as bar,
            torch._dynamo.config.patch(limits),
        ):
            for bucket in buckets:
                for _ in range(runs):
                    self._run(*self._empty_inputs(bucket))
                bar.advance(1, f"{bucket.batch} × {bucket.cameras} cameras, {bucket.words} words")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._is_warm, seconds = True, time.perf_counter() - started
        if not self._ahead_of_time:
            logger.info(
                "Compiled %d graphs in %.1f s: batches of %s, %s cameras, prompts of %s tokens.",
                *(len(buckets) + len(sizes), seconds),
                *(", ".join(map(str, part)) for part in dataclasses.astuple(self.buckets)),
            )
        return seconds

    @torch.no_grad()
    def act_with(self, observation: Observation, options: ActOptions) -> Response:
        if not self._is_warm:
            self.warm_up()
        noise, reason = options.noise, self._obstacle(observation, options)
        if reason is None and noise is not None:
            try:
                with self._nothing_compiled():
                    path = self._act(observation, noise, options.committed)
                    return Response(path[-1], path=path)
            except RuntimeError as error:
                if _NO_GRAPH not in str(error):
                    raise
                reason = f"a graph that does not fit any more ({error})"
        return self._act_without_graphs(str(reason), observation, options)

    def _nothing_compiled(self) -> AbstractContextManager[object]:
        """Raise RuntimeError, instead of compiling, for a call that no graph fits."""
        if self._ahead_of_time:
            return nullcontext()
        return torch.compiler.set_stance(_NO_GRAPH)

    def _act_without_graphs(
        self, reason: str, observation: Observation, options: ActOptions
    ) -> Response:
        if self._ahead_of_time:
            raise ValueError(
                f"The exported graphs cannot compute {reason}. Serve the checkpoint itself for "
                "such requests."
            )
        warn_once(logger, reason, "Not compiled, and therefore slower: %s.", reason)
        return self._model.act_with(observation, options)

    def _obstacle(self, observation: Observation, options: ActOptions) -> str | None:
        """Return what the graphs cannot compute; None if they can answer."""
        chunk = (self.config.action_horizon, self.config.action_dim)
        prompt, mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
        obstacles = {
            "guided real-time chunking": options.guidance is not None,
            "decoding of tokens": options.visit is not None,
            f"another number of steps than {self.num_steps}": (
                (options.num_steps or self.config.num_steps) != self.num_steps
            ),
            "actions without given noise": options.noise is None,
            "several candidates, or noise of another shape": (
                options.noise is not None and options.noise.shape[1:] != chunk
            ),
            "a state of another size": observation.state.shape[1:] != chunk[1:],
            "an observation without a prompt": prompt is None or mask is None,
            "a prompt with a given response": _any(
                observation.token_ar_mask, observation.token_hidden_mask
            ),
            "images that are not bytes of the model's size": any(
                image.dtype != torch.uint8 or set(image.shape[1:3]) != {self.config.image_size}
                for image in observation.images.values()
            ),
        }
        if found := next((reason for reason, is_so in obstacles.items() if is_so), None):
            return found
        assert mask is not None
        lengths = mask.sum(1)
        if int(lengths.max()) > self.buckets.words[-1]:
            return f"a prompt of more than {self.buckets.words[-1]} tokens"
        if not torch.equal(mask, masks.left_aligned(lengths, mask.shape[1])):
            return "a prompt with gaps"
        counts = {sum(row) for row in self._present(observation)}
        if others := counts - set(self.buckets.cameras):
            return f"an observation with {', '.join(map(str, sorted(others)))} cameras"
        return None

    def _present(self, observation: Observation) -> list[tuple[bool, ...]]:
        """Return which of the model's cameras each sample has."""
        columns = [observation.image_masks[camera].tolist() for camera in self.config.cameras]
        return list(zip(*columns, strict=True))

    def _act(
        self, observation: Observation, noise: Float[Tensor, "b h a"], committed: Committed | None
    ) -> Float[Tensor, "t b h a"]:
        path = noise.new_empty(self.num_steps + 1, *noise.shape, dtype=torch.float32)
        present = self._present(observation)
        for cameras in sorted(set(present)):
            alike = [row for row, has in enumerate(present) if has == cameras]
            most = self.buckets.batches[-1]
            for start in range(0, len(alike), most):
                rows = alike[start : start + most]
                names = [name for name, has in zip(self.config.cameras, cameras) if has]
                inputs = self._inputs(observation, noise, committed, rows, names)
                index = send(torch.tensor(rows), self.device)
                # A copy: the next run of a CUDA graph overwrites its result.
                path[:, index] = self._run(*inputs)[:, : len(rows)]
        return path

    def _inputs(
        self,
        observation: Observation,
        noise: Tensor,
        committed: Committed | None,
        rows: list[int],
        cameras: list[str],
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the graphs for some samples with the same cameras."""
        prompt, mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
        assert prompt is not None
        assert mask is not None
        words, count = mask.sum(1)[rows], len(rows)
        bucket = self.buckets.smallest(count, len(cameras), int(words.max()))
        index = send(torch.tensor(rows), self.device)
        # Tensors made in one way have the same strides, to which graphs are bound as well.
        images, tokens, lengths, state, start, *known = inputs = self._empty_inputs(bucket)
        images[:count] = torch.stack([observation.images[name][index] for name in cameras], dim=1)
        width = min(bucket.words, prompt.shape[1])
        tokens[:count, :width] = prompt[index, :width]
        lengths[:count] = send(words, self.device) + len(cameras) * self.config.tokens_per_camera
        state[:count], start[:count] = observation.state[index], noise[index]
        if committed is not None:
            previous, steps = known
            previous[:count], steps[:count] = committed.previous[index], committed.steps[index]
        return inputs

    def _empty_inputs(self, bucket: Bucket) -> tuple[Tensor, ...]:
        """Return inputs of a bucket's shapes: black images and prompts of padding."""
        config, pixels = self.config, self.config.image_size
        images = (bucket.batch, bucket.cameras, pixels, pixels, 3)
        chunk = (bucket.batch, config.action_horizon, config.action_dim)
        return (
            torch.zeros(images, dtype=torch.uint8, device=self.device),
            torch.zeros(bucket.batch, bucket.words, dtype=torch.long, device=self.device),
            torch.full((bucket.batch,), self._num_tokens(bucket), device=self.device),
            torch.zeros(bucket.batch, config.action_dim, device=self.device),
            torch.zeros(chunk, device=self.device),
            *(part.to(self.device) for part in nothing_committed(config, bucket.batch)),
        )

    def _num_tokens(self, bucket: Bucket) -> int:
        return bucket.cameras * self.config.tokens_per_camera + bucket.words

    def _run(
        self, images: Tensor, prompt: Tensor, lengths: Int[Tensor, " b"], *rest: Tensor
    ) -> Float[Tensor, "t b h a"]:
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        keys_and_values = self._graphs.prefill(images, prompt, lengths)
        return self._graphs.denoise(list(keys_and_values), lengths, *rest)


def nothing_committed(config: ModelConfig, batch: int) -> tuple[Tensor, ...]:
    """Return the old chunk and its committed steps for rows without any.

    Empty for a model that cannot continue an old chunk.
    """
    if not config.max_delay:
        return ()
    shape = (batch, config.action_horizon, config.action_dim)
    return torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.bool)


def _any(*masks_: Tensor | None) -> bool:
    return any(mask is not None and bool(mask.any()) for mask in masks_)

"""How many operations of one chunk launch something: the cost of small policies.

    python benchmarks/launches.py
    python benchmarks/launches.py pi05 --cameras 3 --packed
    python benchmarks/launches.py --checkpoint runs/demo/checkpoints/tiny_aloha_sim/demo

Every operation that PyTorch dispatches is counted, except views and allocations. The models have
the depth of the full-size ones and a small width, which does not change the counts. A GPU without
graphs pays for launches, too.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

from common import main
from inference import make_observation
from piston.cli.console import console, table
from piston.inference.loading import load_policy
from piston.inference.packing import join_for_inference, prepare_for_inference
from piston.models.configs import GemmaSize, Pi0Config, VisionSize
from piston.models.flow import Pi0
from piston.models.model import ActOptions
from piston.models.precision import cast_for_inference
from piston.observation import Observation

_GEMMA = GemmaSize(width=64, depth=18, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
_VISION = VisionSize(width=48, depth=27, mlp_dim=64, num_heads=4, patch=14)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Count the operations of one chunk that launch something."""

    # Which model, of full depth.
    model: Annotated[Literal["pi0", "pi05"], tyro.conf.Positional] = "pi0"
    # The model of this checkpoint instead; its CPU time per chunk is measured as well.
    checkpoint: Path | None = None
    cameras: int = 2
    prompt_tokens: int = 16
    # Pack weights where this CPU gains from it, as `piston serve` does.
    packed: bool = False


class Counts(NamedTuple):
    """Operations that launch something."""

    chunk: int
    # Of each denoising step after the first.
    step: int
    kinds: Counter[str]

    @property
    def rest(self) -> int:
        """Those of the prefix, and of all that is computed once per chunk."""
        return self.chunk - 10 * self.step


class LaunchCounter(TorchDispatchMode):
    """Counts dispatched operations, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        is_view = func.is_view or name in ("detach", "_unsafe_view")
        if not is_view and "empty" not in name:
            self.kinds[name] += 1
        return func(*args, **(kwargs or {}))


def count_launches(model: Pi0, observation: Observation) -> Counts:
    """Count the operations of a chunk of ten steps, and of one of them."""
    noise = model.draw(observation.batch_size)["noise"][:, 0]

    def count(num_steps: int) -> Counter[str]:
        with torch.no_grad(), LaunchCounter() as counter:
            model.act_with(observation, ActOptions(noise, num_steps=num_steps))
        return counter.kinds

    fewer, kinds = count(9), count(10)
    return Counts(kinds.total(), kinds.total() - fewer.total(), kinds)


def deep_model(*, pi05: bool) -> Pi0:
    """Return a narrow model of full depth, with weights in bfloat16."""
    config = Pi0Config(
        pi05=pi05,
        vision=_VISION,
        vlm=_GEMMA,
        action_expert=_GEMMA,
        image_size=28,
        vocab_size=512,
        dtype="bfloat16",
    )
    model = Pi0(config).eval()
    cast_for_inference(model, torch.bfloat16)
    return model


def cpu_seconds(call: Callable[[], object], repeats: int = 50) -> float:
    """Return the CPU time of a call: the least of several rounds."""
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(repeats // 5):
            call()
        rounds.append((time.process_time() - started) / (repeats // 5))
    return min(rounds)


def run(options: Arguments) -> None:
    if options.checkpoint is None:
        model = deep_model(pi05=options.model == "pi05")
        (prepare_for_inference if options.packed else join_for_inference)(model)
    else:
        model = cast(Pi0, load_policy(options.checkpoint).model)
    config = model.config
    observation = make_observation(config, options.cameras, options.prompt_tokens, 1)
    counts = count_launches(model, observation)
    depth = config.action_expert.depth
    rows = [
        ("chunk of ten steps", str(counts.chunk)),
        ("prefix and rest", str(counts.rest)),
        ("denoising step", str(counts.step)),
        ("per layer and step", f"{counts.step / depth:.1f}"),
        *((name, str(count)) for name, count in counts.kinds.most_common(12)),
    ]
    if options.checkpoint is not None:
        noise = model.draw(1)["noise"][:, 0]
        seconds = cpu_seconds(lambda: model.act(observation, noise))
        rows.append(("CPU milliseconds per chunk", f"{1000 * seconds:.1f}"))
    title = f"{config.family}, {options.cameras} cameras, {options.prompt_tokens} prompt tokens"
    console().print(table(("operations", "count"), rows, title=title, right=("count",)))


if __name__ == "__main__":
    main(run, Arguments)

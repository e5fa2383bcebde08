"""Seconds per chunk of a full-size model, and how near that is to the limit of the machine.

The limit is the arithmetic that the chunk needs, at the rate of a large matrix product measured in
the same run. Weights are random, which changes neither.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import tyro
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common import main, median_seconds, seconds_of
from piston import weights
from piston.cli.console import console
from piston.inference.loading import quantize_for_inference
from piston.models import cpu
from piston.models.configs import GEMMA, VISION, GemmaSize, Pi0Config
from piston.models.flow import Pi0
from piston.models.precision import cast_for_inference
from piston.observation import Observation

Held = Literal["float32", "bfloat16", "int8"]
Computed = Literal["float32", "bfloat16"]
_MODELS = {
    "pi0": Pi0Config(),
    "pi05": Pi0Config(pi05=True),
    # Too small to be worth measuring, but quick.
    "dummy": Pi0Config(
        vision=VISION["dummy"],
        vlm=GEMMA["dummy"],
        action_expert=GEMMA["dummy"],
        vocab_size=300,
        tokenizer="bytes",
    ),
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure one chunk of a full-size model with random weights."""

    # The family, or a dummy to see that the benchmark works.
    model: Annotated[Literal["pi0", "pi05", "dummy"], tyro.conf.Positional]
    # What the weights are held in.
    dtype: Held = "bfloat16"
    # What activations are computed in; by default the same (float32 for int8).
    compute: Computed | None = None
    # How many of the three camera slots are present.
    cameras: int = 2
    # Words in the prompt.
    prompt_tokens: int = 12
    # Denoising steps.
    num_steps: int = 10
    # Chunks that are timed; the median is shown.
    repeats: int = 3
    # Write the weights to a file first, and time from there to the first action.
    file: bool = False


def run(options: Arguments) -> None:
    computed: Computed = options.compute or (
        "bfloat16" if options.dtype == "bfloat16" else "float32"
    )
    config = dataclasses.replace(_MODELS[options.model], dtype=computed)
    observation = make_observation(config, options.cameras, options.prompt_tokens)
    if options.file:
        model, first_action = _load_from_file(config, options.dtype, observation, options.num_steps)
    else:
        model, first_action = random_model(config, options.dtype), None
    timing = measure(model, observation, options.num_steps, options.repeats)
    rate = matmul_rate(config.vlm, options.dtype, computed)
    rows = [
        ("seconds per chunk", f"{timing.chunk:.2f}"),
        ("    vision", f"{timing.vision:.2f}"),
        ("    prefill", f"{timing.prefill:.2f}"),
        ("    denoising", f"{timing.denoising:.2f}"),
        ("arithmetic needed", f"{timing.operations / 1e12:.2f} TFLOP"),
        ("large matrix product on this machine", f"{rate / 1e9:.0f} GFLOP/s"),
        ("share of that rate (1.0 is the limit)", f"{timing.operations / rate / timing.chunk:.2f}"),
        ("peak memory of this process", f"{_peak_memory() / 1e9:.2f} GB"),
    ]
    if first_action is not None:
        rows.append(
            ("from the file (in the page cache) to the first action", f"{first_action:.1f} s")
        )
    title = (
        f"{config.family}, held in {options.dtype}, computed in {computed}, {options.cameras} of "
        f"{len(config.cameras)} cameras, {options.prompt_tokens} prompt tokens, "
        f"{options.num_steps} steps, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def random_model(config: Pi0Config, dtype: Held) -> Pi0:
    """Filled from one block of random numbers: drawing three billion takes longer than a chunk."""
    model = cast(Pi0, weights.build_on_meta(config))
    if dtype != "float32":
        cast_for_inference(model, torch.bfloat16)
    block = torch.randn(2**22) * 0.02
    state = {name: _tiled(block, tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    if dtype == "int8":
        quantize_for_inference(model)
    return model.eval()


def _tiled(block: Tensor, like: Tensor) -> Tensor:
    filled = torch.empty(like.shape, dtype=like.dtype)
    flat = filled.view(-1)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])
    return filled


def make_observation(config: Pi0Config, cameras: int, prompt_tokens: int) -> Observation:
    if not 0 <= cameras <= len(config.cameras) or not 1 <= prompt_tokens <= config.prompt_length:
        raise ValueError(
            f"The model has {len(config.cameras)} cameras and {config.prompt_length} prompt "
            f"tokens; asked for {cameras} and {prompt_tokens}."
        )
    pixels = config.image_size
    image = torch.randint(0, 256, (1, pixels, pixels, 3), dtype=torch.uint8)
    places = torch.arange(config.prompt_length)[None]
    return Observation(
        images=dict.fromkeys(config.cameras, image),
        image_masks={
            camera: torch.tensor([index < cameras]) for index, camera in enumerate(config.cameras)
        },
        state=torch.zeros(1, config.action_dim),
        tokenized_prompt=places + 2,
        tokenized_prompt_mask=places < prompt_tokens,
    )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one chunk and of its parts, and the arithmetic in it."""

    chunk: float
    vision: float
    prefill: float
    denoising: float
    operations: int


@torch.no_grad()
def measure(model: Pi0, observation: Observation, num_steps: int, repeats: int) -> Timing:
    noise = torch.randn(1, model.config.action_horizon, model.config.action_dim)
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    with counter:  # the warm-up as well
        model.act(observation, noise, num_steps=num_steps)
    chunk = median_seconds(lambda: model.act(observation, noise, num_steps=num_steps), repeats)
    embed = median_seconds(lambda: model.embed_prefix(observation), repeats)
    prefix = median_seconds(lambda: model.prefill(observation), repeats)
    return Timing(chunk, embed, prefix - embed, chunk - prefix, counter.get_total_flops())


def _product_operations(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


def _attention_operations(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    batch, heads, rows, dim = query
    return 2 * batch * heads * rows * key[2] * (dim + value[3])


# What torch's own counter leaves out on CPUs.
_UNCOUNTED = {
    torch.ops.aten._int_mm: _product_operations,
    torch.ops.piston.tile_product: _product_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
}


def matmul_rate(size: GemmaSize, dtype: Held, computed: Computed) -> float:
    """Operations per second of the best of several large products, as the model would run them."""
    rates = []
    product: Callable[[Tensor, Tensor], Tensor]
    width, mlp_dim = size.width, size.mlp_dim
    for rows, inner, columns in ((512, width, mlp_dim), (512, mlp_dim, width), (width,) * 3):
        if dtype == "int8":
            a = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
            b = torch.randint(-127, 128, (columns, inner), dtype=torch.int8).t()
            product = torch._int_mm
        else:
            held = getattr(torch, computed)
            a, b = torch.randn(rows, inner).to(held), torch.randn(columns, inner).to(held).t()
            product = _product_of_the_models(held)
        seconds = min(seconds_of(lambda: product(a, b)) for _ in range(8))  # noqa: B023
        rates.append(2 * rows * inner * columns / seconds)
    return max(rates)


def _product_of_the_models(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    uses_tiles = dtype == torch.bfloat16 and cpu.choose_product() == "tiles"
    return (lambda a, b: cpu.tile_product(a, b, None, dtype)) if uses_tiles else torch.mm


def _load_from_file(
    config: Pi0Config, dtype: Held, observation: Observation, num_steps: int
) -> tuple[Pi0, float]:
    """Seconds from a file that was just written, so that it is in the page cache."""
    stored: Held = "float32" if dtype == "float32" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory is not counted here.
        writer = multiprocessing.get_context("spawn").Process(
            target=_write_random, args=(config, stored, Path(folder) / "model")
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"Writing the file failed with exit code {writer.exitcode}.")
        started = time.perf_counter()
        model = cast(Pi0, weights.load_model(Path(folder) / "model"))
        if dtype == "int8":
            quantize_for_inference(model)
        model.eval().act(observation, num_steps=num_steps)
        return model, time.perf_counter() - started


def _write_random(config: Pi0Config, dtype: Held, path: Path) -> None:
    weights.save_model(random_model(config, dtype), config, path)


def _peak_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(run, Arguments)

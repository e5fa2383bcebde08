"""Seconds per chunk of a full-size model, and how near that is to the limit of the machine.

    python benchmarks/inference.py pi0
    python benchmarks/inference.py pi0 --ways eager compiled int8 one-step --cameras 2 1 3 \\
        --batches 1 2 4 8 --json inference.json

Cameras are varied with the first batch, batches with the first number of cameras. The limit is the
arithmetic that the chunk needs, at the rate of a large matrix product measured in the same run.
Weights are random, which changes neither.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common import main, median_seconds, seconds_of
from piston import weights
from piston.cli.console import console, table
from piston.inference.compiled import Buckets, GraphEngine, compile_graphs
from piston.inference.packing import Int8Linear, prepare_for_inference, quantize_for_inference
from piston.models import cpu
from piston.models.configs import GEMMA, VISION, GemmaSize, Pi0Config
from piston.models.flow import Pi0
from piston.models.model import ActOptions
from piston.models.precision import Linear, cast_for_inference
from piston.observation import Observation
from piston.progress import ProgressBar

Held = Literal["float32", "bfloat16", "int8"]
Way = Literal["eager", "compiled", "int8", "one-step"]
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
    """Measure chunks of a full-size model with random weights."""

    # The family, or a dummy to see that the benchmark works.
    model: Annotated[Literal["pi0", "pi05", "dummy"], tyro.conf.Positional]
    # What is measured: the model as it is served (eager), compiled, held in eight bits (CPUs), or
    # with one denoising step, as after `piston distill`.
    ways: tuple[Way, ...] = ("eager",)
    # What the weights are held in; int8 is a way of its own.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # How many of the three camera slots are present. The first one is that of larger batches.
    cameras: tuple[int, ...] = (2,)
    # Requests that are answered together.
    batches: tuple[int, ...] = (1,)
    # Words in each prompt.
    prompt_tokens: int = 12
    # Denoising steps.
    num_steps: int = 10
    # Chunks that are timed; the median is shown.
    repeats: int = 3
    # Write the weights to a file first, and time from there to the first action (eager).
    file: bool = False
    # Also compare a chunk with that of float32 weights (eager and int8). All weights are drawn for
    # this, which takes one minute more for each way.
    cosine: bool = False
    # cpu, or cuda.
    device: str = "cpu"
    # Also write the numbers to this file.
    json: Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of one way to compute, for some cameras and a batch; seconds."""

    way: Way
    cameras: int
    batch: int
    chunk: float
    vision: float
    prefill: float
    denoising: float
    # Of the arithmetic that the chunk needs, at the rate of a large product in the same run.
    share: float
    # Between the actions and those of float32 weights.
    cosine: float = math.nan

    def cells(self) -> tuple[str, ...]:
        parts = (self.vision, self.prefill, self.denoising)
        shown = ("–" if math.isnan(part) else f"{part:.3g}" for part in parts)
        return (
            *(self.way, str(self.cameras), str(self.batch), f"{self.chunk:.3g}", *shown),
            *(f"{self.chunk / self.batch:.3g}", f"{self.share:.2f}"),
            "–" if math.isnan(self.cosine) else f"{self.cosine:.5f}",
        )


def run(options: Arguments) -> None:
    if options.cosine and options.file:
        raise ValueError("--cosine draws the weights of each way anew: leave out --file.")
    device = torch.device(options.device)
    computed = options.dtype
    config = dataclasses.replace(_MODELS[options.model], dtype=computed)
    rate = matmul_rate(config.vlm, options.dtype, computed, device)
    rows: list[Row] = []
    exact = None
    if options.cosine:
        in_float32 = dataclasses.replace(config, dtype="float32")
        exact = _fixed_chunk(random_model(in_float32, "float32", drawn=True).to(device), options)
    sizes = [(cameras, options.batches[0]) for cameras in options.cameras]
    sizes += [(options.cameras[0], batch) for batch in options.batches[1:]]
    first_action = None
    with ProgressBar("measuring", "sizes", len(sizes) * len(options.ways), after=0) as bar:
        for way in options.ways:
            if way == "eager" and options.file:
                model, first_action = _load_from_file(config, options)
            else:
                model = _model_of(way, config, options.dtype, drawn=options.cosine)
            if way != "compiled":
                prepare_for_inference(model)
            model.to(device)
            cosine = math.nan
            if exact is not None and way in ("eager", "int8"):
                actions = _fixed_chunk(model, options)
                cosine = torch.cosine_similarity(actions.flatten(), exact.flatten(), dim=0).item()
            own_rate = matmul_rate(config.vlm, "int8", "float32", device) if way == "int8" else rate
            for cameras, batch in sizes:
                found = _measure(model, way, cameras, batch, options)
                share = found.operations / own_rate / found.chunk
                numbers = (found.chunk, found.vision, found.prefill, found.denoising)
                rows.append(Row(way, cameras, batch, *numbers, share, cosine))
                bar.advance(1, f"{way}: {found.chunk:.3g} s")
            del model
    _show(rows, rate, first_action, config, options)


def _model_of(way: Way, config: Pi0Config, dtype: Held, *, drawn: bool) -> Pi0:
    if way == "int8":
        return random_model(dataclasses.replace(config, dtype="float32"), "int8", drawn=drawn)
    if way == "one-step":
        config = dataclasses.replace(config, distilled_steps=1)
    return random_model(config, dtype, drawn=drawn)


@torch.no_grad()
def _fixed_chunk(model: Pi0, options: Arguments) -> Tensor:
    """Return the actions for an observation and noise that are the same for all models."""
    torch.manual_seed(0)
    observation = make_observation(model.config, options.cameras[0], options.prompt_tokens, 1)
    noise, device = model.draw(1)["noise"][:, 0], next(model.parameters()).device
    actions = model.act(observation.to(device), noise.to(device), num_steps=options.num_steps)
    return actions.cpu()


def _measure(model: Pi0, way: Way, cameras: int, batch: int, options: Arguments) -> Timing:
    device = next(model.parameters()).device
    num_steps = 1 if way == "one-step" else options.num_steps
    observation = make_observation(model.config, cameras, options.prompt_tokens, batch).to(device)
    if way != "compiled":
        return measure(model, observation, num_steps, options.repeats)
    every = Buckets.of(model.config, (cameras,), batch)
    words = every.smallest(batch, cameras, options.prompt_tokens).words
    buckets = Buckets((batch,), (cameras,), (words,))
    torch._dynamo.reset()
    engine = GraphEngine(model, compile_graphs(model, num_steps), buckets, num_steps, device=device)
    engine.warm_up()
    noise = model.draw(batch)["noise"][:, 0].to(device)
    act = ActOptions(noise, num_steps=num_steps)
    seconds = median_seconds(_finished(lambda: engine.act_with(observation, act)), options.repeats)
    operations = count_operations(lambda: model.act_with(observation, act))
    return Timing(seconds, math.nan, math.nan, math.nan, operations)


def _show(
    rows: Sequence[Row],
    rate: float,
    first_action: float | None,
    config: Pi0Config,
    options: Arguments,
) -> None:
    place = f"{torch.get_num_threads()} threads" if options.device == "cpu" else options.device
    title = (
        f"{config.family}, {options.dtype}, {options.prompt_tokens} prompt tokens, "
        f"{options.num_steps} steps, {place}; seconds"
    )
    head = ("way", "cameras", "batch", "chunk", "vision", "prefill", "denoising", "per sample")
    head += ("share", "cosine")
    shown = [row.cells() for row in rows]
    console().print(table(head, shown, title=title, right=head[1:]))
    facts = {
        "large matrix product": f"{rate / 1e9:.0f} GFLOP/s (share 1.0 is this rate)",
        "peak memory of this process": f"{_peak_memory() / 1e9:.2f} GB",
    }
    if first_action is not None:
        facts["from the file (in the page cache) to the first action"] = f"{first_action:.1f} s"
    for name, value in facts.items():
        console().print(f"{name}: {value}", highlight=False)
    if options.json is not None:
        about = {"options": dataclasses.asdict(options) | {"json": str(options.json)}}
        measured = [
            {name: None if value != value else value for name, value in vars(row).items()}
            for row in rows
        ]
        numbers = {"product_rate": rate, "peak_memory": _peak_memory(), "rows": measured}
        options.json.write_text(json.dumps(about | numbers, indent=1))


def random_model(config: Pi0Config, dtype: Held, *, drawn: bool = False) -> Pi0:
    """Filled from one block of random numbers, or `drawn`: all three billion, as for training.

    Drawn weights are the same each time. Drawing them takes longer than a chunk.
    """
    if drawn:
        torch.manual_seed(0)
        model = cast(Pi0, weights.build_model(config))
    else:
        model = cast(Pi0, weights.build_on_meta(config))
    if dtype != "float32":
        cast_for_inference(model, torch.bfloat16)
    if not drawn:
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


def make_observation(
    config: Pi0Config, cameras: int, prompt_tokens: int, batch: int
) -> Observation:
    if not 0 <= cameras <= len(config.cameras) or not 1 <= prompt_tokens <= config.prompt_length:
        raise ValueError(
            f"The model has {len(config.cameras)} cameras and {config.prompt_length} prompt "
            f"tokens; asked for {cameras} and {prompt_tokens}."
        )
    pixels = config.image_size
    image = torch.randint(0, 256, (batch, pixels, pixels, 3), dtype=torch.uint8)
    places = torch.arange(config.prompt_length).expand(batch, -1)
    return Observation(
        images=dict.fromkeys(config.cameras, image),
        image_masks={
            camera: torch.full((batch,), index < cameras)
            for index, camera in enumerate(config.cameras)
        },
        state=torch.zeros(batch, config.action_dim),
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
    noise = model.draw(observation.batch_size)["noise"][:, 0].to(observation.device)

    def act() -> Tensor:
        return model.act(observation, noise, num_steps=num_steps)

    operations = count_operations(act)  # the warm-up as well
    chunk = median_seconds(_finished(act), repeats)
    embed = median_seconds(_finished(lambda: model.embed_prefix(observation)), repeats)
    prefix = median_seconds(_finished(lambda: model.prefill(observation)), repeats)
    cache, options = model.prefill(observation), ActOptions(num_steps=num_steps)
    denoise = median_seconds(_finished(lambda: model.denoise(cache, noise, options)), repeats)
    return Timing(chunk, embed, prefix - embed, denoise, operations)


def count_operations(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        call()
    return counter.get_total_flops()


def _finished(call: Callable[[], object]) -> Callable[[], None]:
    """Return a call that ends when the device has finished."""

    def run_to_the_end() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run_to_the_end


def _product_operations(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


def _packed_operations(x: Sequence[int], *others: Any, **_: object) -> int:
    """Of `mkldnn._linear_pointwise`: (x, weight, …), or (x, factor, weight, bias, "mul")."""
    weight = others[1] if others[-1] == "mul" else others[0]
    return 2 * math.prod(x) * weight[0]


def _int8_operations(x: Sequence[int], *others: Any, **_: object) -> int:
    """Of `onednn.qlinear_pointwise`: (x, scale, zero, weight, scale per output, …)."""
    return 2 * math.prod(x) * others[3][0]


def _attention_operations(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    batch, heads, rows, dim = query
    return 2 * batch * heads * rows * key[2] * (dim + value[3])


# What torch's own counter leaves out on CPUs.
_UNCOUNTED = {
    torch.ops.mkldnn._linear_pointwise: _packed_operations,
    torch.ops.onednn.qlinear_pointwise: _int8_operations,
    torch.ops.piston.tile_product: _product_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
}


def matmul_rate(size: GemmaSize, dtype: Held, computed: Computed, device: torch.device) -> float:
    """Operations per second of the best of several large products, as the model would run them."""
    rates = []
    product: Callable[[Tensor, Tensor], Tensor]
    width, mlp_dim = size.width, size.mlp_dim
    for rows, inner, columns in ((512, width, mlp_dim), (512, mlp_dim, width), (width,) * 3):
        if dtype == "int8":
            a, b = torch.randn(rows, inner), torch.empty(0)
            linear = Int8Linear(Linear(inner, columns, bias=False))
            product = lambda a, _: linear(a)  # noqa: B023, E731
        else:
            held = getattr(torch, computed)
            a, b = torch.randn(rows, inner).to(held), torch.randn(columns, inner).to(held).t()
            a, b = a.to(device), b.to(device)
            on_cpu = device.type == "cpu"
            product = _product_of_the_models(held) if on_cpu else torch.mm
        once = _finished(lambda: product(a, b))  # noqa: B023
        seconds = min(seconds_of(once) for _ in range(8))
        rates.append(2 * rows * inner * columns / seconds)
    return max(rates)


def _product_of_the_models(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    uses_tiles = dtype == torch.bfloat16 and cpu.choose_product() == "tiles"
    return (lambda a, b: cpu.tile_product(a, b, None, dtype)) if uses_tiles else torch.mm


def _load_from_file(config: Pi0Config, options: Arguments) -> tuple[Pi0, float]:
    """Seconds from a file that was just written, so that it is in the page cache."""
    observation = make_observation(config, options.cameras[0], options.prompt_tokens, 1)
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory is not counted here.
        writer = multiprocessing.get_context("spawn").Process(
            target=_write_random, args=(config, options.dtype, Path(folder) / "model")
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"Writing the file failed with exit code {writer.exitcode}.")
        started = time.perf_counter()
        model = cast(Pi0, weights.load_model(Path(folder) / "model"))
        model.eval().act(observation, num_steps=options.num_steps)
        return model, time.perf_counter() - started


def _write_random(config: Pi0Config, dtype: Held, path: Path) -> None:
    weights.save_model(random_model(config, dtype), config, path)


def _peak_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(run, Arguments)

"""A policy compiled ahead of time into one file: `piston export` writes it, `piston serve` runs it.

    FILE.pt2                    a zip archive in PyTorch's PT2 format
      data/aotinductor/prefill  native code and weights of images and prompt
      data/aotinductor/denoise  native code and weights of the denoising loop
      extra/config.json         model, robots with their statistics, where it was compiled and how

Batch, cameras and prompt length are dynamic, so that one graph serves all sizes and every weight is
stored once. The code fits the torch version and the kind of machine that made it; both are checked
before any of it is loaded. Loading it runs it: only files that you trust may be loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piston import presets
from piston.config import TRAIN_SECTION, DataConfig, TrainConfig
from piston.extras import require_compiler
from piston.files import publish
from piston.inference.compiled import (
    Buckets,
    GraphEngine,
    Graphs,
    nothing_committed,
    refuse_to_compile,
)
from piston.models import cpu
from piston.models.build import build_on_meta
from piston.models.flow import Pi0
from piston.models.model import Model
from piston.models.precision import Linear
from piston.models.static import StaticDenoise, StaticPrefill
from piston.progress import ProgressBar
from piston.serialization import to_json
from piston.transforms.normalize import NormStats, norm_stats_from_json, norm_stats_to_json

if TYPE_CHECKING:
    from torch.export import ExportedProgram

logger = logging.getLogger(__name__)

SUFFIX = ".pt2"
_FORMAT = {"format": "piston-export", "version": 1}
_CONFIG = "config.json"


class Robot(NamedTuple):
    """One robot of an exported policy."""

    config: TrainConfig
    norm_stats: Mapping[str, NormStats]
    use_quantile_norm: bool


class ExportedPolicy(NamedTuple):
    """What a file holds, ready to run. The model has no memory: it says what the graphs compute."""

    model: Model
    engine: GraphEngine
    robots: dict[str, Robot]


def export(
    file: Path,
    model: Model,
    configs: Mapping[str, TrainConfig],
    pipelines: Mapping[str, DataConfig],
    buckets: Buckets,
    num_steps: int,
) -> None:
    """Compile a model and write it with its robots; an existing file is replaced.

    `configs` and `pipelines` are those of the robots by name, as `load_parts` returns them.
    """
    if file.suffix != SUFFIX:
        raise ValueError(f"{file} does not end in {SUFFIX}, by which such a file is recognised.")
    refuse_to_compile(model)
    require_compiler("An exported policy")
    assert isinstance(model, Pi0)
    device = next(model.parameters()).device
    robots = {
        name: {
            TRAIN_SECTION: to_json(configs[name]),
            "norm_stats": norm_stats_to_json(pipeline.norm_stats or {}),
            "use_quantile_norm": pipeline.use_quantile_norm,
        }
        for name, pipeline in pipelines.items()
    }
    described = {
        **_FORMAT,
        "made_with": made_with(device),
        "device": device.type,
        "num_steps": num_steps,
        "buckets": dataclasses.asdict(buckets),
        "robots": robots,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        temporary = Path(folder) / file.name
        _compile(temporary, export_graphs(model, buckets, num_steps), described)
        publish(temporary, file)


def _compile(
    file: Path, programs: Mapping[str, ExportedProgram], described: Mapping[str, Any]
) -> None:
    from torch._inductor import aot_compile
    from torch.export.pt2_archive._package import package_pt2

    compiled: dict[str, Any] = {}
    with ProgressBar("compiling", "graphs", len(programs)) as bar:
        for name, program in programs.items():
            arguments, _ = program.example_inputs
            options = {
                "aot_inductor.package": True,
                # Beside the file, where there is room for weights: torch's cache would keep them.
                "aot_inductor.output_path": str(file) + name,
                # What calls the kernels is as long as the model is deep, and not worth optimising.
                "aot_inductor.compile_wrapper_opt_level": "O0",
                # There are too few files to gain from it.
                "aot_inductor.precompile_headers": False,
            }
            compiled[name] = aot_compile(program.module(), arguments, options=options)
            bar.advance(1, name)
    extra = {_CONFIG: json.dumps(described, ensure_ascii=False)}
    package_pt2(str(file), aoti_files=compiled, extra_files=extra)


def export_graphs(model: Pi0, buckets: Buckets, num_steps: int) -> dict[str, ExportedProgram]:
    """Return the graphs of prefill and denoising, with dynamic batch, cameras and words."""
    device = next(model.parameters()).device
    mixed = any(one.cpu_product == "float32" for one in model.modules() if isinstance(one, Linear))
    if mixed and device.type == "cpu" and model.compute_dtype == torch.bfloat16:
        raise ValueError(
            "On this CPU large bfloat16 products run in float32 and small ones do not, which a "
            "graph for batches of any size cannot choose. Export with --dtype float32."
        )
    with torch.no_grad(), torch.device(device):
        return {
            "prefill": _export_prefill(model, buckets),
            "denoise": _export_denoise(model, buckets, num_steps),
        }


def _export_prefill(model: Pi0, buckets: Buckets) -> ExportedProgram:
    batch, batch_dim = _size("batch", 1, buckets.batches[-1])
    cameras, cameras_dim = _size("cameras", buckets.cameras[0], buckets.cameras[-1])
    words, words_dim = _size("words", 1, buckets.words[-1])
    pixels = model.config.image_size
    inputs = (
        torch.zeros(batch, cameras, pixels, pixels, 3, dtype=torch.uint8),
        torch.zeros(batch, words, dtype=torch.long),
        torch.full((batch,), cameras * model.config.tokens_per_camera + words),
    )
    varies = ({0: batch_dim, 1: cameras_dim}, {0: batch_dim, 1: words_dim}, {0: batch_dim})
    prefill = StaticPrefill(model).eval()
    return torch.export.export(prefill, inputs, dynamic_shapes=varies, strict=False)


def _export_denoise(model: Pi0, buckets: Buckets, num_steps: int) -> ExportedProgram:
    config, per_camera = model.config, model.config.tokens_per_camera
    batch, batch_dim = _size("batch", 1, buckets.batches[-1])
    fewest, most = (count * per_camera for count in (buckets.cameras[0], buckets.cameras[-1]))
    tokens, tokens_dim = _size("tokens", fewest + 1, most + buckets.words[-1])
    shape = (batch, config.vlm.num_kv_heads, tokens, config.vlm.head_dim)
    keys_and_values = [
        torch.zeros(shape, dtype=model.compute_dtype) for _ in range(2 * config.vlm.depth)
    ]
    rest = (
        torch.full((batch,), tokens),
        torch.zeros(batch, config.action_dim),
        torch.zeros(batch, config.action_horizon, config.action_dim),
        *nothing_committed(config, batch),
    )
    varies = (
        [{0: batch_dim, 2: tokens_dim} for _ in keys_and_values],
        *({0: batch_dim} for _ in rest),
    )
    denoise, inputs = StaticDenoise(model, num_steps).eval(), (keys_and_values, *rest)
    return torch.export.export(denoise, inputs, dynamic_shapes=varies, strict=False)


def _size(name: str, least: int, most: int) -> tuple[int, Any]:
    """Return an example of a size, and how it varies.

    The example is not 1, which torch would take for a constant.
    """
    if least == most:
        return most, torch.export.Dim.STATIC
    return most, torch.export.Dim(name, min=least, max=most)


def made_with(device: torch.device) -> dict[str, Any]:
    """Return what compiled code depends on."""
    facts = {
        "torch": torch.__version__,
        "system": platform.system(),
        "processor": platform.machine(),
        "flags": sorted(cpu.read_cpuinfo().get("flags", "").split()),
        "bfloat16 products": cpu.choose_product(),
    }
    if device.type == "cuda":
        facts["gpu"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts


def load(file: Path, device: torch.device | None = None) -> ExportedPolicy:
    """Check that a file fits this machine, then load its native code and weights.

    `device` None is the kind of device that it was compiled for.
    """
    described = _read_description(file)
    made_for = torch.device(described["device"]) if device is None else device
    if made_for.type != described["device"]:
        raise ValueError(
            f"{file} was compiled for {described['device']}, but {made_for} is asked for. Leave "
            "out --device, or export the checkpoint for that device."
        )
    if made_for.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{file} was compiled for a GPU, but torch finds none here.")
    _check_machine(file, described["made_with"], made_with(made_for))
    robots = {
        name: Robot(
            presets.train_config_from_json(entry[TRAIN_SECTION], f"{file}: {TRAIN_SECTION}"),
            norm_stats_from_json(entry["norm_stats"]),
            bool(entry["use_quantile_norm"]),
        )
        for name, entry in described["robots"].items()
    }
    model = build_on_meta(next(iter(robots.values())).config.model)
    buckets = Buckets(**{name: tuple(sizes) for name, sizes in described["buckets"].items()})
    engine = GraphEngine(
        *(model, _load_graphs(file, made_for), buckets, int(described["num_steps"])),
        device=made_for,
        ahead_of_time=True,
    )
    return ExportedPolicy(model, engine, robots)


def _load_graphs(file: Path, device: torch.device) -> Graphs:
    from torch.export.pt2_archive._package import load_pt2

    index = -1 if device.index is None else device.index
    runners: Mapping[str, Any] = load_pt2(str(file), device_index=index).aoti_runners
    return Graphs(runners["prefill"], runners["denoise"])


def _read_description(file: Path) -> dict[str, Any]:
    """Return config.json of the archive, without loading any code from it."""
    try:
        with zipfile.ZipFile(file) as archive:
            places = [name for name in archive.namelist() if name.endswith(f"/extra/{_CONFIG}")]
            described = json.loads(archive.read(places[0])) if places else None
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{file} is not a whole exported policy: {error}") from error
    if not isinstance(described, dict) or {k: described.get(k) for k in _FORMAT} != _FORMAT:
        raise ValueError(
            f"{file} is not a policy that this version of `piston export` wrote: it has no "
            f"{_CONFIG} with {_FORMAT}. Export the checkpoint again."
        )
    return described


def _check_machine(file: Path, made: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differences = [
        f"{name} {made.get(name)} (here {here.get(name)})"
        for name in (*here, *(made.keys() - here.keys()))
        if name != "flags" and made.get(name) != here.get(name)
    ]
    if missing := sorted(set(made.get("flags", ())) - set(here["flags"])):
        differences.append(f"a processor with {_shortened(missing)}, which this one lacks")
    if differences:
        raise ValueError(
            f"{file} was compiled for another machine: {'; '.join(differences)}. Compiled code "
            "runs only where it was made, or on an equal machine. Export the checkpoint here: "
            f"piston export CHECKPOINT {file.name}"
        )


def _shortened(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")

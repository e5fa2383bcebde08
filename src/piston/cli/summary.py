"""`piston summary PRESET|CHECKPOINT`: the experts side by side, tokens, mask and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.table import Table

from piston import presets, weights
from piston.cli.console import console
from piston.models import masks
from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig
from piston.models.flow import Pi0
from piston.models.precision import cast_for_inference
from piston.models.variants import GemmaSize

# Bytes per trained parameter: float32 master, gradient, two moments of AdamW, mean of weights.
_TRAINING_BYTES = 4 + 4 + 8 + 4


def run(args: list[str]) -> int:
    tyro.cli(_summary, args=args, prog="piston summary")
    return 0


def _summary(what: Annotated[str, tyro.conf.Positional]) -> None:
    """Show what a model is made of, how its tokens see each other, and the memory it needs.

    Args:
        what: A preset's name, or a checkpoint's folder or location.
    """
    config, source = _find(what)
    model = weights.build_on_meta(config)
    screen = console()
    screen.print(f"[bold]{what}[/bold]  {config.family}, {source}\n")
    screen.print(_parts(model))
    screen.print(_tokens(model))
    screen.print("\nwho sees whom (row sees column)", style="bold")
    screen.print(_mask(model) + "\n", highlight=False)
    screen.print(_memory(model))


def _find(what: str) -> tuple[ModelConfig, str]:
    if what in presets.names():
        return presets.get(what).model, "as the preset says"
    if "://" not in what and not Path(what).exists():
        presets.get(what)  # raises with the nearest name
    checkpoint = weights.open_checkpoint(what)
    return checkpoint.config, f"from a {checkpoint.format} checkpoint"


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parts(model: Pi0 | Pi0FAST) -> Table:
    config, vision = model.config, model.config.vision
    columns: dict[str, dict[str, str]] = {
        "vision tower": {
            "parameters": f"{_count(model.vision):,}",
            "width": str(vision.width),
            "layers": str(vision.depth),
            "mlp": str(vision.mlp_dim),
            "heads": f"{vision.num_heads} × {vision.width // vision.num_heads}",
            "reads": f"{config.image_size}×{config.image_size} in patches of {vision.patch}",
        },
        "vision-language expert": _expert_column(
            config.vlm, _count(model.vlm), f"prefix, vocabulary {config.vocab_size:,}"
        ),
    }
    if isinstance(model, Pi0):
        count = _count(model.action_expert) + _count(model.suffix)
        columns["action expert"] = _expert_column(model.config.action_expert, count, "suffix")
    table = Table(title=f"{_count(model):,} parameters", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in ("parameters", "width", "layers", "mlp", "heads", "LoRA", "reads"):
        cells = [column.get(row, "–") for column in columns.values()]
        if any(cell != "–" for cell in cells):
            table.add_row(row, *cells)
    return table


def _expert_column(size: GemmaSize, count: int, reads: str) -> dict[str, str]:
    return {
        "parameters": f"{count:,}",
        "width": str(size.width),
        "layers": str(size.depth),
        "mlp": str(size.mlp_dim),
        "heads": f"{size.num_heads} × {size.head_dim}, {size.num_kv_heads} key",
        "LoRA": "–" if size.lora is None else f"rank {size.lora.rank}",
        "reads": reads,
    }


def _tokens(model: Pi0 | Pi0FAST) -> Table:
    """The layout of a sequence in which every camera is present and the prompt is full."""
    config = model.config
    table = Table(title="tokens", title_justify="left")
    for column in ("part", "tokens", "from"):
        table.add_column(column, justify="right" if column == "tokens" else "left")
    for camera in config.cameras:
        table.add_row(camera, str(config.tokens_per_camera), "prefix, if the camera is present")
    table.add_row("prompt", f"≤ {config.prompt_length}", "prefix, without padding")
    if isinstance(model, Pi0):
        starts = model.suffix.starts_block(torch.device("cpu"))
        if len(starts) > config.action_horizon:
            table.add_row("state", "1", "suffix")
        table.add_row("actions", str(config.action_horizon), "suffix, one per step of the chunk")
    else:
        table.add_row("action codes", "within the prompt", "written one by one")
    return table


def _mask(model: Pi0 | Pi0FAST) -> str:
    prefix = [("images", False), ("prompt", False)]
    if isinstance(model, Pi0FAST):
        return masks.draw([*prefix, ("codes", True)], causal=["codes"])
    has_state = len(model.suffix.starts_block(torch.device("cpu"))) > model.config.action_horizon
    state = [("state", True)] if has_state else []
    return masks.draw([*prefix, *state, ("actions", True)])


def _memory(model: Pi0 | Pi0FAST) -> Table:
    """Parameters and what belongs to each of them; activations come on top."""
    count = _count(model)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora" in name)
    table = Table(title="memory for weights", title_justify="left")
    for column in ("", "float32", "bfloat16"):
        table.add_column(column, justify="left" if not column else "right")
    kept = _float32_always(model)
    table.add_row("inference", _bytes(4 * count), _bytes(2 * count + 2 * kept))
    # Training keeps float32 masters either way; bfloat16 halves activations, not weights.
    full = _bytes(_TRAINING_BYTES * count)
    table.add_row("training, all weights, with EMA", full, full)
    if adapters:
        lora = _bytes(4 * (count - adapters) + _TRAINING_BYTES * adapters)
        table.add_row("training, adapters alone", lora, lora)
    return table


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def _float32_always(model: Pi0 | Pi0FAST) -> int:
    """Parameters that stay float32 when the model is held in bfloat16."""
    held = weights.build_on_meta(model.config)
    cast_for_inference(held, torch.bfloat16)
    return sum(p.numel() for p in held.parameters() if p.dtype == torch.float32)

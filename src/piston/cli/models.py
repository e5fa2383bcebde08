"""`piston convert SOURCE TARGET`, `piston summary PRESET|CHECKPOINT` and `piston verify PATH…`.

What needs torch is imported where it is used: --help does without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from piston import presets
from piston.cli.console import console, table
from piston.progress import BYTES, ProgressBar

if TYPE_CHECKING:
    from torch import nn

    from piston.models.model import Model
    from piston.verification import Quantity

# Bytes per trained parameter: float32 master, gradient, two moments of AdamW, mean of weights.
_TRAINING_BYTES = 4 + 4 + 8 + 4


def run_convert(args: list[str]) -> None:
    tyro.cli(_convert, args=args, prog="piston convert")


def run_summary(args: list[str]) -> None:
    tyro.cli(_summary, args=args, prog="piston summary")


def _convert(
    source: Annotated[str, tyro.conf.Positional],
    target: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["float32", "bfloat16"] | None = None,
    preset: str | None = None,
) -> None:
    """Write a checkpoint of the JAX trainer, openpi's PyTorch or LeRobot in Piston's format.

    Args:
        source: A folder, a .safetensors file, or a location (gs://, hf://, https://).
        target: The new folder.
        dtype: Hold the large matrices in this; by default as they are stored.
        preset: Check the sizes against this preset; by default they are inferred.
    """
    import torch

    from piston import weights

    with ProgressBar("converting", BYTES) as bar:
        checkpoint = weights.convert(
            source,
            target,
            None if dtype is None else getattr(torch, dtype),
            config=None if preset is None else presets.get(preset).model,
            progress=bar.show,
        )
    console().print(
        f"Wrote {target}: {checkpoint.config.family}, {len(checkpoint.names())} tensors, "
        f"{checkpoint.num_bytes / 1e6:,.1f} MB."
    )


def _summary(what: Annotated[str, tyro.conf.Positional]) -> None:
    """Show what a model is made of, how its tokens attend to each other, and the memory it needs.

    Args:
        what: A preset's name, or a checkpoint's folder or location.
    """
    from piston import weights
    from piston.models import masks

    if what in presets.names():
        config, source = presets.get(what).model, "as the preset says"
    else:
        if "://" not in what and not Path(what).exists():
            presets.get(what)  # raises with the nearest name
        checkpoint = weights.open_checkpoint(what)
        config, source = checkpoint.config, f"from a {checkpoint.format} checkpoint"
    model = weights.build_on_meta(config)
    screen = console()
    screen.print(f"[bold]{what}[/bold]  {config.family}, {source}\n")
    screen.print(_parts(model))
    screen.print(_tokens(model))
    groups = [masks.TokenGroup("images"), *model.token_groups()[len(config.cameras) :]]
    screen.print("\nattention (a row attends to the marked columns)", style="bold")
    screen.print(masks.draw(groups) + "\n", highlight=False)
    screen.print(_memory(model))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parts(model: Model) -> Table:
    config, vision = model.config, model.config.vision
    reads = {"vlm": f"prefix, vocabulary {config.vocab_size:,}", "action_expert": "suffix"}
    titles = {"vlm": "vision-language expert", "action_expert": "action expert"}
    parts: dict[str, dict[str, str]] = {
        "vision tower": {
            "parameters": f"{_count(model.vision):,}",
            "width": str(vision.width),
            "layers": str(vision.depth),
            "mlp": str(vision.mlp_dim),
            "heads": f"{vision.num_heads} × {vision.width // vision.num_heads}",
            "reads": f"{config.image_size}×{config.image_size} in patches of {vision.patch}",
        },
    }
    rest = _count(model) - _count(model.vision)
    for name, expert in model.experts.items():
        # What belongs to no other part, such as the suffix, is counted with the last expert.
        count = rest if name == list(model.experts)[-1] else _count(expert)
        rest -= count
        size = expert.size
        parts[titles[name]] = {
            "parameters": f"{count:,}",
            "width": str(size.width),
            "layers": str(size.depth),
            "mlp": str(size.mlp_dim),
            "heads": f"{size.num_heads} × {size.head_dim}, {size.num_kv_heads} key",
            "LoRA": "–" if size.lora is None else f"rank {size.lora.rank}",
            "reads": reads[name],
        }
    names = ("parameters", "width", "layers", "mlp", "heads", "LoRA", "reads")
    rows = [[name, *(part.get(name, "–") for part in parts.values())] for name in names]
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    return table(["", *parts], rows, title=f"{_count(model):,} parameters", right=parts)


def _tokens(model: Model) -> Table:
    """Return the layout of a sequence with every camera and a full prompt."""
    rows = []
    for group in model.token_groups():
        size = "within the prompt" if group.size is None else str(group.size)
        size = f"≤ {size}" if group.name == "prompt" else size
        rows.append((group.name, size, group.source))
    return table(("part", "tokens", "from"), rows, title="tokens", right=("tokens",))


def _memory(model: Model) -> Table:
    """Return the memory of parameters and optimizer; activations come on top."""
    import torch

    from piston import weights
    from piston.models.precision import cast_for_inference

    count = _count(model)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora" in name)
    held = weights.build_on_meta(model.config)
    cast_for_inference(held, torch.bfloat16)
    in_bfloat16 = _bytes(sum(p.numel() * p.element_size() for p in held.parameters()))
    # Training keeps float32 masters either way; bfloat16 halves activations, not weights.
    full = _bytes(_TRAINING_BYTES * count)
    rows = [
        ("inference", _bytes(4 * count), in_bfloat16),
        ("training, all weights, with EMA", full, full),
    ]
    if adapters:
        lora = _bytes(4 * (count - adapters) + _TRAINING_BYTES * adapters)
        rows.append(("training, adapters alone", lora, lora))
    dtypes = ("float32", "bfloat16")
    return table(("", *dtypes), rows, title="memory for weights", right=dtypes)


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def run_verify(args: list[str]) -> int:
    paths = tyro.cli(_paths_argument, args=args, prog="piston verify")
    from piston import verification  # imports torch

    cases = [case for path in paths for case in verification.find_cases(path)]
    quantities = [quantity for case in cases for quantity in _replay(case)]
    wrong = sum(not quantity.ok for quantity in quantities)
    console().print(
        f"\n{len(quantities)} quantities in {len(cases)} cases: "
        + (f"[red]{wrong} wrong[/red]" if wrong else "[green]all ok[/green]")
    )
    return 1 if wrong else 0


def _paths_argument(paths: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> tuple[Path, ...]:
    """Replay reference cases and compare every quantity with its expected value.

    Args:
        paths: Case folders or files, or folders that hold some.
    """
    if not paths:
        raise ValueError("Name at least one case: piston verify PATH…")
    return paths


def _replay(case: Path) -> list[Quantity]:
    """Print one line per quantity of a case."""
    from piston import verification

    screen = console()
    screen.print(f"\n[bold]{escape(str(case))}[/bold]", soft_wrap=True)
    quantities = []
    for quantity in verification.replay(case):
        quantities.append(quantity)
        verdict = "[green]ok[/green]" if quantity.ok else "[red]WRONG[/red]"
        screen.print(
            f"  {escape(quantity.name):<44} {quantity.error:>10.2e}  "
            f"tolerance {quantity.tolerance:.0e}  {verdict}  [dim]{escape(quantity.note)}[/dim]",
            highlight=False,
            soft_wrap=True,
        )
    return quantities

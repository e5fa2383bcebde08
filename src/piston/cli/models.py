"""`piston convert SOURCE TARGET`, `piston summary PRESET|CHECKPOINT` and `piston verify PATH…`.

What needs torch is imported where it is used: --help does without.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from piston.cli.command import Command, named
from piston.cli.console import UsageError, console, table
from piston.models.configs import NamedGemmaSize, NamedVisionSize
from piston.progress import BYTES, ProgressBar

if TYPE_CHECKING:
    from torch import nn

    from piston.models.model import Model
    from piston.verification import Quantity

Format = Literal["piston", "openpi", "openpi-jax", "lerobot"]

# Bytes per trained parameter: float32 master, gradient, two moments of AdamW, mean of weights.
_TRAINING_BYTES = 4 + 4 + 8 + 4


def _convert(
    source: Annotated[str, tyro.conf.Positional, named("SOURCE")],
    target: Annotated[Path, tyro.conf.Positional, named("TARGET")],
    to: Format = "piston",
    merge_lora: bool = False,
    dtype: Literal["float32", "bfloat16"] | None = None,
    preset: str | None = None,
    vision: NamedVisionSize | None = None,
    vlm: NamedGemmaSize | None = None,
    action_expert: NamedGemmaSize | None = None,
    asset_id: str | None = None,
) -> None:
    """Write a checkpoint of Piston, openpi or LeRobot in another format.

    Args:
        source: A folder, a .safetensors file, or a location (gs://, hf://, https://).
        target: The new folder.
        to: The format of the new folder; openpi is for its PyTorch models, openpi-jax for its JAX
            models.
        merge_lora: Add LoRA adapters to the weights that they adapt; the result has none.
        dtype: Hold the large matrices in this; by default as they are stored.
        preset: Check the sizes against this preset; by default they are inferred.
        vision: The size of the vision tower, if it cannot be inferred.
        vlm: The size of the vision-language expert, if it cannot be inferred.
        action_expert: The size of the action expert, if it cannot be inferred.
        asset_id: Which statistics in assets/ LeRobot gets, or a name for those of a LeRobot policy.
    """
    import torch

    from piston import presets, weights

    sizes = {"vision": vision, "vlm": vlm, "action_expert": action_expert}
    with ProgressBar("converting", BYTES) as bar:
        checkpoint = weights.convert(
            source,
            target,
            None if dtype is None else getattr(torch, dtype),
            to=to,
            merge_lora=merge_lora,
            config=None if preset is None else presets.get(preset).model,
            sizes={part: size for part, size in sizes.items() if size is not None},
            asset_id=asset_id,
            progress=bar.show,
        )
    console().print(
        f"Wrote {target}: {checkpoint.config.family}, {len(checkpoint.names())} tensors, "
        f"{checkpoint.num_bytes / 1e6:,.1f} MB."
    )


def _summary(what: Annotated[str, tyro.conf.Positional, named("MODEL")]) -> None:
    """Show a model's parts, how its tokens attend to each other, and its memory.

    Args:
        what: A preset's name, or a checkpoint's folder or location.
    """
    from piston import presets, weights
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
    titles = {name: name.replace("_", " ") for name in config.experts}
    titles["vlm"] = "vision-language expert"
    reads = dict.fromkeys(config.experts, "suffix")
    reads["vlm"] = f"prefix, vocabulary {config.vocab_size:,}"
    names = ("parameters", "width", "layers", "mlp", "heads", "LoRA", "reads")
    heads = f"{vision.num_heads} × {vision.width // vision.num_heads}"
    pixels = f"{config.image_size}×{config.image_size} in patches of {vision.patch}"
    counts = {"vision tower": _count(model.vision)}
    columns = [(vision.width, vision.depth, vision.mlp_dim, heads, "–", pixels)]
    for name, expert in model.experts.items():
        size, lora = expert.size, expert.size.lora
        heads = f"{size.num_heads} × {size.head_dim}, {size.num_kv_heads} key"
        rank = "–" if lora is None else f"rank {lora.rank}"
        counts[titles[name]] = _count(expert)
        columns.append((size.width, size.depth, size.mlp_dim, heads, rank, reads[name]))
    # What belongs to no other part, such as the suffix, is counted with the last expert.
    counts[titles[name]] += _count(model) - sum(counts.values())
    rows = zip(names, *((f"{n:,}", *column) for n, column in zip(counts.values(), columns)))
    shown = [list(map(str, row)) for row in rows if set(row[1:]) != {"–"}]
    return table(["", *counts], shown, title=f"{_count(model):,} parameters", right=counts)


def _tokens(model: Model) -> Table:
    """Return the layout of a sequence with every camera and a full prompt."""
    rows = []
    for group in model.token_groups():
        size = "within the prompt" if group.size is None else str(group.size)
        rows.append((group.name, f"≤ {size}" if group.name == "prompt" else size, group.source))
    return table(("part", "tokens", "from"), rows, title="tokens", right=("tokens",))


def _memory(model: Model) -> Table:
    """Return the memory of parameters and optimizer; activations come on top."""
    from piston.models.precision import held_as_asked

    count = _count(model)
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora" in name)
    halved = sum(parameter.numel() for _, parameter in held_as_asked(model))
    # Training keeps float32 masters either way; bfloat16 halves activations, not weights.
    full, frozen = _TRAINING_BYTES * count, 4 * (count - adapters) + _TRAINING_BYTES * adapters
    rows = [
        ("inference", 4 * count, 4 * count - 2 * halved),
        ("training, all weights, with EMA", full, full),
        *([("training, adapters alone", frozen, frozen)] if adapters else []),
    ]
    shown = [(name, *map(_bytes, numbers)) for name, *numbers in rows]
    dtypes = ("float32", "bfloat16")
    return table(("", *dtypes), shown, title="memory for weights", right=dtypes)


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def _verify(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, named("CASE [CASE …]")],
) -> int:
    """Replay reference cases and compare every quantity with its expected value.

    Args:
        paths: Case folders or files, or folders that hold some.
    """
    if not paths:
        raise UsageError("Name at least one case: piston verify CASE…")
    from piston import verification  # imports torch

    cases = [case for path in paths for case in verification.find_cases(path)]
    quantities = [quantity for case in cases for quantity in _replay(case)]
    wrong = sum(not quantity.ok for quantity in quantities)
    console().print(
        f"\n{len(quantities)} quantities in {len(cases)} cases: "
        + (f"[red]{wrong} wrong[/red]" if wrong else "[green]all ok[/green]")
    )
    return 1 if wrong else 0


def _replay(case: Path) -> list[Quantity]:
    """Print one line per quantity of a case."""
    from piston import verification

    screen = console()
    screen.print(f"\n[bold]{escape(str(case))}[/bold]", soft_wrap=True)
    quantities = []
    for quantity in verification.replay(case):
        quantities.append(quantity)
        verdict = "[green]ok   [/green]" if quantity.ok else "[red]WRONG[/red]"
        numbers = f"error {quantity.error:.2e}, tolerance {quantity.tolerance:.0e}"
        note = f"  [dim]{escape(quantity.note)}[/dim]" if quantity.note else ""
        screen.print(f"  {verdict}  {numbers}  {escape(quantity.name)}{note}", highlight=False)
    return quantities


run_convert = Command("convert", _convert)
run_summary = Command("summary", _summary)
run_verify = Command("verify", _verify)

"""What can be wrong with a checkpoint. Every message says what was found and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from piston.models.lora import matching_parameters

Shape = tuple[int, ...]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 20  # lines per kind of problem; the exception carries all of them


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is not one."""


class MismatchError(CheckpointError):
    """A checkpoint's tensors are not the model's. Carries every name, also those not printed."""

    def __init__(
        self,
        message: str,
        missing: Sequence[str],
        unexpected: Sequence[str],
        misshaped: Sequence[str],
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshaped = tuple(misshaped)


def check_match(
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    may_be_new: Iterable[str] = (),
    may_miss_some: bool = False,
    what: str,
) -> list[str]:
    """One error with everything that is missing, unexpected or of the wrong shape.

    Returns the names that are missing and may be: some pattern of `may_be_new` matches them. A
    pattern that matches no tensor of the model is an error of its own. With `may_miss_some`
    missing ones are told, but are no reason for the error.
    """
    patterns = tuple(may_be_new)
    absent = sorted(expected.keys() - found.keys())
    allowed = set(matching_parameters(expected, patterns))
    new = [name for name in absent if name in allowed]
    missing = sorted(set(absent) - set(new))
    unexpected = sorted(found.keys() - expected.keys())
    misshaped = sorted(
        name for name in expected.keys() & found.keys() if expected[name] != found[name]
    )
    if not (unexpected or misshaped or (missing and not may_miss_some)):
        return new
    blocks = [
        listing("missing", [f"{name} {expected[name]}" for name in missing]),
        listing(
            "unexpected",
            [f"{name} {found[name]}{did_you_mean(name, missing)}" for name in unexpected],
        ),
        listing(
            "of the wrong shape",
            [f"{name}: found {found[name]}, expected {expected[name]}" for name in misshaped],
        ),
    ]
    message = "\n".join(
        [f"{what}; nothing was loaded.", *filter(None, blocks), _advice(missing, unexpected)]
    )
    raise MismatchError(message, missing, unexpected, misshaped)


def listing(kind: str, lines: Sequence[str]) -> str:
    """`36 missing:` and the first of them, layers in one line; empty where there is none."""
    if not lines:
        return ""
    merged = _merge_layers(lines)
    shown = [f"    {line}" for line in merged[:_SHOWN]]
    if len(merged) > _SHOWN:
        shown.append(f"    … and {len(merged) - _SHOWN} more lines")
    return "\n".join([f"  {len(lines)} {kind}:", *shown])


def _merge_layers(lines: Sequence[str]) -> list[str]:
    """Lines that differ only in the layer become one: `vlm.layers.[0-17].mlp.up.weight`."""
    layers: dict[str, list[int]] = {}
    for line in lines:
        numbers = set(_LAYER.findall(line))
        template = _LAYER.sub("{}", line) if len(numbers) == 1 else line
        layers.setdefault(template, []).extend(int(number) for number in numbers)
    return [
        template.replace("{}", _ranges(numbers)) if numbers else template
        for template, numbers in layers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """`3`, `[0-17]` or `[0-3,7]`."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"[{','.join(texts)}]"


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.85)
    return f" (did you mean {close[0]}?)" if close else ""


def _advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if missing and all(".lora_" in name for name in missing) and not unexpected:
        return (
            "The model has adapters and the checkpoint has none: allow them to start fresh with "
            "--may-be-new '*.lora_?'"
        )
    return (
        "Use the configuration that the checkpoint was made with; what is meant to be trained from "
        "scratch has to be named: --may-be-new PATTERN …"
    )

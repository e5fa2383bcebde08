"""Errors of checkpoints, and the comparison of a checkpoint's tensors with a model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from piston.models.lora import matching_parameters
from piston.suggestions import did_you_mean

Shape = tuple[int, ...]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN = 20  # lines per kind of problem; the exception carries all of them


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is none."""


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
    """Raise one MismatchError for all tensors that are missing, unexpected or of another shape.

    Return the names of missing tensors that a pattern of `may_be_new` allows. A pattern that
    matches no tensor of the model is an error. With `may_miss_some`, missing tensors are listed but
    do not cause the error.
    """
    allowed = set(matching_parameters(expected, tuple(may_be_new)))
    absent = sorted(expected.keys() - found.keys())
    missing = [name for name in absent if name not in allowed]
    unexpected = sorted(found.keys() - expected.keys())
    common = sorted(expected.keys() & found.keys())
    misshaped = [name for name in common if expected[name] != found[name]]
    if not (unexpected or misshaped or (missing and not may_miss_some)):
        return [name for name in absent if name in allowed]
    suggestions = [did_you_mean(name, missing, cutoff=0.85) for name in unexpected]
    blocks = [
        listing("missing", [f"{name} {expected[name]}" for name in missing]),
        listing(
            "unexpected",
            [f"{name} {found[name]}{text}" for name, text in zip(unexpected, suggestions)],
        ),
        listing(
            "of the wrong shape",
            [f"{name}: found {found[name]}, expected {expected[name]}" for name in misshaped],
        ),
    ]
    lines = [f"{what}; nothing was loaded.", *filter(None, blocks), _advice(missing, unexpected)]
    raise MismatchError("\n".join(lines), missing, unexpected, misshaped)


def listing(kind: str, lines: Sequence[str]) -> str:
    """Return `36 missing:` and the first lines, with the layers joined; empty without lines."""
    if not lines:
        return ""
    layers: dict[str, list[int]] = {}  # lines that differ only in the number of the layer
    for line in lines:
        numbers = set(_LAYER.findall(line))
        template = _LAYER.sub("{}", line) if len(numbers) == 1 else line
        layers.setdefault(template, []).extend(map(int, numbers))
    merged = [template.replace("{}", _ranges(sorted(n))) for template, n in layers.items()]
    shown = [f"    {line}" for line in merged[:_SHOWN]]
    if len(merged) > _SHOWN:
        shown.append(f"    … and {len(merged) - _SHOWN} more lines")
    return "\n".join([f"  {len(lines)} {kind}:", *shown])


def _ranges(numbers: Sequence[int]) -> str:
    """Return `3`, `[0-17]` or `[0-3,7]`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"


def _advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if missing and all(".lora_" in name for name in missing) and not unexpected:
        return (
            "The model has adapters and the checkpoint has none: allow new ones with "
            "--may-be-new '*.lora_?'"
        )
    return (
        "Use the configuration that the checkpoint was made with. Tensors that are meant to be "
        "trained from scratch have to be named: --may-be-new PATTERN …"
    )

"""What a model expects of a checkpoint: models without memory, and the check of their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from piston.models.autoregressive import Pi0FAST
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.models.flow import Pi0
from piston.models.lora import matching_parameters
from piston.models.model import Model
from piston.models.precision import use_fastest_products
from piston.suggestions import did_you_mean

Shape = tuple[int, ...]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_MODELS: dict[type[ModelConfig], Callable[[Any], Model]] = {Pi0Config: Pi0, Pi0FASTConfig: Pi0FAST}
_RANDOM_FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_"}
_SHOWN = 20  # lines per kind of problem; the exception carries all of them


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is none."""


class MismatchError(CheckpointError):
    """A checkpoint's tensors are not the model's. Carries every name, also those not printed."""

    def __init__(self, message: str, *names: Iterable[str]) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.misshaped = map(tuple, names)


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
    hints = {name: did_you_mean(name, missing, cutoff=0.85) for name in unexpected}
    kinds = {
        "missing": [f"{name} {expected[name]}" for name in missing],
        "unexpected": [f"{name} {found[name]}{hints[name]}" for name in unexpected],
        "of the wrong shape": [
            f"{name}: found {found[name]}, expected {expected[name]}" for name in misshaped
        ],
    }
    advice = (
        "Use the configuration that the checkpoint was made with. Tensors that are meant to be "
        "trained from scratch have to be named: --may-be-new PATTERN …"
    )
    if missing and all(".lora_" in name for name in missing) and not unexpected:
        advice = (
            "The model has adapters and the checkpoint has none: allow new ones with "
            "--may-be-new '*.lora_?'"
        )
    message = f"{what}; nothing was loaded.\n{listing(kinds)}\n{advice}"
    raise MismatchError(message, missing, unexpected, misshaped)


def listing(kinds: Mapping[str, Sequence[str]]) -> str:
    """Return `36 missing:` and the first lines for each kind with any; layers are joined."""
    texts = []
    for kind, lines in kinds.items():
        layers: dict[str, list[int]] = {}  # lines that differ only in the number of the layer
        for line in lines:
            numbers = set(_LAYER.findall(line))
            template = _LAYER.sub("{}", line) if len(numbers) == 1 else line
            layers.setdefault(template, []).extend(map(int, numbers))
        merged = [template.replace("{}", _ranges(sorted(n))) for template, n in layers.items()]
        texts += [f"  {len(lines)} {kind}:"] if lines else []
        texts += [f"    {line}" for line in merged[:_SHOWN]]
        if len(merged) > _SHOWN:
            texts.append(f"    … and {len(merged) - _SHOWN} more lines")
    return "\n".join(texts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return `3`, `[0-17]` or `[0,1,3]`."""
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"[{numbers[0]}-{numbers[-1]}]"
    return f"[{','.join(map(str, numbers))}]"


def build_model(config: ModelConfig) -> Model:
    """Return the model of a configuration, on torch's current default device.

    It uses the fastest products that this machine's CPU has, should it run there.
    """
    if type(config) not in _MODELS:
        raise TypeError(f"No model is known for a {type(config).__name__}.")
    model = _MODELS[type(config)](config)
    use_fastest_products(model)
    return model


def build_on_meta(config: ModelConfig) -> Model:
    """Return the model without memory: for its names and shapes, or to be filled later."""
    with torch.device("meta"), _WithoutRandomFills():
        return build_model(config)


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors that a checkpoint of this configuration has to hold."""
    return shapes_of(build_on_meta(config).state_dict())


def initial_values(config: ModelConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the values with which a new model would start, for these parameters only."""
    model = build_on_meta(config)
    values: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        modules[path] = model.get_submodule(path)
        values[name] = torch.empty(modules[path].get_parameter(leaf).shape)
        setattr(modules[path], leaf, nn.Parameter(values[name]))
    with _WithoutRandomFills():  # the parameters that stay on the meta device
        for module in modules.values():
            module.reset_parameters()  # type: ignore[operator]
    return values


class _WithoutRandomFills(TorchFunctionMode):
    """Random fills of tensors on the meta device do nothing.

    They have no effect there, but the first one imports parts of torch that take a second.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target: Any = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in _RANDOM_FILLS and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))

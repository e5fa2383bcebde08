"""The whole of a run's state as one dictionary of tensors, and back.

    model/<name>                     master weights; frozen ones too, so that a folder is whole
    optimizer/<name>/<part>          AdamW's moments and its count of steps
    ema/<name>                       the mean of the weights that train

Under FSDP the tensors are spread over the processes; whoever saves and loads deals with that.
Random numbers have no state: they follow from the seed and the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from piston.training.distributed import whole
from piston.training.step import Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


def state_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """The tensors themselves, not copies."""
    tensors = {f"model/{name}": value for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.parameters.items():
        # A parameter that no loss depends on has no state.
        for part, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{part}"] = value
    if trainer.ema is not None:
        tensors |= {f"ema/{name}": value for name, value in trainer.ema.mean.items()}
    return tensors


def snapshot(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies on the CPU, which training does not change any more: the state, and what gets served.

    Under FSDP the state is this process's part of it, and what gets served is put together on the
    first process. Else the two share their memory.
    """
    tensors = state_tensors(trainer)
    state = {name: _copied(value) for name, value in tensors.items()}
    if trainer.config.sharding != "fsdp":
        return state, _served(state)
    served = {}
    for name, value in _served(tensors).items():
        gathered = whole(value)  # one at a time, with the help of all
        if trainer.processes.is_first:
            served[name] = _copied(gathered)
    return state, served


def _served(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of the weights where there is one."""
    names = [name.removeprefix("model/") for name in tensors if name.startswith("model/")]
    return {name: tensors.get(f"ema/{name}", tensors[f"model/{name}"]) for name in names}


def prepare_to_load(trainer: Trainer, saved: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Tensors to be filled in place, the optimizer's state made where the saved run had one."""
    for name, parameter in trainer.parameters.items():
        if f"optimizer/{name}/step" in saved:
            state = trainer.optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
    tensors = state_tensors(trainer)
    present = {name: tuple(value.shape) for name, value in tensors.items()}
    differing = [name for name in {**saved, **present} if saved.get(name) != present.get(name)]
    if differing:
        listed = "; ".join(
            f"{name} (saved: {saved.get(name, 'none')}, now: {present.get(name, 'none')})"
            for name in differing[:4]
        )
        raise ValueError(
            f"The checkpoint is of another run: {len(differing)} tensors differ, such as {listed}. "
            "Resume with the same model, --freeze and --ema-decay, or start a new run with "
            "--weights."
        )
    return tensors


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()

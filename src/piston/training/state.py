"""The whole of a run's state as one dictionary of tensors, and back.

    model/<name>                     master weights (of parameters that train; frozen ones are as
                                     they were loaded, and are kept too so that a folder is whole)
    optimizer/<name>/<part>          AdamW's moments and its count of steps
    ema/<name>                       the mean of the weights

Under FSDP the tensors are spread over the processes; whoever saves and loads deals with that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from piston.training.step import Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")


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


def prepare_to_load(trainer: Trainer, saved_names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors to be filled in place, the optimizer's state made where the saved run had one."""
    saved = set(saved_names)
    for name, parameter in trainer.parameters.items():
        if f"optimizer/{name}/step" in saved:
            state = trainer.optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
    tensors = state_tensors(trainer)
    if tensors.keys() != saved:
        differing = sorted(tensors.keys() ^ saved)
        raise ValueError(
            f"The checkpoint is of another run: {', '.join(differing[:4])} … "
            f"({len(differing)} tensors) are only in one of the two. Resume with the same model, "
            "--freeze and --ema-decay, or start a new run with --weights."
        )
    return tensors

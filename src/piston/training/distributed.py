"""Several processes as one run: started by torchrun, one node or many.

Everything distributed is here; models, step and loop only ask how many there are and which one
this is. With one process nothing of this is active.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from piston.config import Sharding
from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among all of them."""

    rank: int
    world_size: int
    device: torch.device
    # For checkpoints, written in the background while training goes on with the others.
    background_group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def agree(self, flag: bool) -> bool:
        """Whether it is so on any process: all take the same decision."""
        return self.sum(float(flag)) > 0

    def wait_for_all(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def start(sharding: Sharding) -> Processes:
    """Join the others that torchrun started, if any."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size > 1 and sharding == "none":
        raise ValueError(
            f"torchrun started {world_size} processes, but --sharding is none, so that each would "
            "train on its own. Give --sharding ddp, or fsdp if the model does not fit on one."
        )
    if world_size == 1 and sharding != "none":
        raise ValueError(
            f"--sharding {sharding} would do nothing in one process. Start several: "
            "torchrun --nproc-per-node 2 -m piston.cli train …"
        )
    if world_size == 1:
        return Processes(0, 1, device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    return Processes(rank, world_size, device, dist.new_group(backend="gloo"))


def stop(processes: Processes) -> None:
    if processes.world_size > 1:
        dist.destroy_process_group()


def shard(model: Pi0 | Pi0FAST, method: str, sharding: Sharding) -> Callable[..., Tensor]:
    """The model's method, run so that gradients become the mean over all processes."""
    if sharding == "ddp":
        # Parameters at the end of the VLM take part in no loss, so they must not be waited for.
        return DistributedDataParallel(_Method(model, method), find_unused_parameters=True)
    if sharding == "fsdp":
        experts = [model.vlm, model.action_expert] if isinstance(model, Pi0) else [model.vlm]
        for layer in (layer for expert in experts for layer in expert.layers):
            fully_shard(layer)
            register_fsdp_forward_method(layer, "remember")
        for block in model.vision.blocks:
            fully_shard(block)
        fully_shard(model)
        for name in (method, "sample_actions", "generate_tokens"):
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
    return getattr(model, method)


@contextmanager
def gradients_exchanged(forward: Callable[..., Tensor], now: bool) -> Iterator[None]:
    """Inside, with `now` False, a backward pass leaves the exchange to a later one."""
    if now or not isinstance(forward, DistributedDataParallel):
        yield
    else:
        with forward.no_sync():
            yield


class _Method(nn.Module):
    """DDP watches `forward`; this makes one of a model's method."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return getattr(self.model, self.method)(*args, **options)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process may hold a part; every process must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

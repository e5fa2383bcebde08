"""Several processes as one run, started by torchrun on one node or many: groups, DDP, FSDP.

Models know nothing of it. With one process nothing of it is active.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from piston.config import Sharding, TrainConfig
from piston.models.gemma import AdaptiveRMSNorm
from piston.models.model import Model

T = TypeVar("T")
Losses = Callable[..., dict[str, Tensor]]

# Writing a large checkpoint, or reading all of it to see that it is whole, may take this long.
_PATIENCE = datetime.timedelta(hours=2)


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among all of them."""

    rank: int
    world_size: int
    device: torch.device
    # For saving: it has a longer timeout, and a thread may use it beside training.
    patient_group: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes. It does not wait for a GPU."""
        if self.world_size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        return totals.tolist()

    def from_first(self, find: Callable[[], T]) -> T:
        """Return on all processes what `find` returns on the first."""
        found: list[Any] = [find() if self.is_first else None]
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0, group=self.patient_group)
        return found[0]

    def wait_for_all(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.patient_group)


@contextmanager
def join_processes(config: TrainConfig) -> Iterator[Processes]:
    """Join the other processes that torchrun started, if any."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    _check(config, world_size)
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Processes(0, 1, device)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    patient_group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Processes(rank, world_size, device, patient_group)
    finally:
        # gloo's threads need Python's lock for a moment after a sum. A group that is freed just
        # then waits for them while they wait for the lock.
        time.sleep(0.2)
    # Not after an error: the other processes may be within a step, so this could wait for ever.
    # torchrun ends them as soon as this process has ended.
    dist.destroy_process_group()


def _check(config: TrainConfig, world_size: int) -> None:
    if world_size > 1 and config.sharding == "none":
        raise ValueError(
            f"torchrun started {world_size} processes, but --sharding is none, so that each would "
            "train on its own. Give --sharding ddp, or fsdp if the model does not fit on one."
        )
    if world_size == 1 and config.sharding != "none":
        raise ValueError(
            f"--sharding {config.sharding} would do nothing in one process. Start several: "
            "torchrun --nproc-per-node 2 -m piston.cli train …"
        )
    parts = world_size * config.gradient_accumulation
    if config.batch_size % parts:
        raise ValueError(
            f"--batch-size is {config.batch_size}; it must be a multiple of {parts}: {world_size} "
            f"processes × {config.gradient_accumulation} parts (--gradient-accumulation)."
        )


def shard(model: Model, sharding: Sharding) -> Losses:
    """Return the model's `training_losses`, with gradients averaged over all processes."""
    if sharding == "ddp":
        # Where some parameters have no part in the loss, those of the vision tower may have none
        # either, in a batch without images: DDP must not wait for their gradients.
        unused = bool(model.unused_parameters())
        model.forward = model.training_losses  # the method that DDP calls
        return DistributedDataParallel(model, find_unused_parameters=unused)
    if sharding == "none":
        return model.training_losses
    # Keys and values leave a layer as views, which are never changed in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Every layer is sharded on its own, so that only one of them is gathered at a time.
    for layer in model.layers():
        for module in layer.modules():
            if isinstance(module, AdaptiveRMSNorm):  # its modulation is computed before the layer
                fully_shard(module.modulation)
        fully_shard(layer)
        if hasattr(layer, "prefill"):
            register_fsdp_forward_method(layer, "prefill")
    fully_shard(model)
    for method in ("training_losses", "act"):
        register_fsdp_forward_method(model, method)
    return model.training_losses


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP has gathered, which would not follow changes of their shards.

    FSDP does so by itself after a backward pass, but not after a forward pass alone.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gradients_exchanged(forward: Losses, now: bool) -> AbstractContextManager[None]:
    """Within this context, with `now` False, a backward pass leaves the exchange to a later one."""
    if now or not isinstance(forward, DistributedDataParallel):
        return nullcontext()
    return forward.no_sync()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which this process may hold a shard; all processes must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

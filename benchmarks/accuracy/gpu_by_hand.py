"""What people write by hand for one GPU: autocast, or FSDP2 with a policy of precision, eager or by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.accuracy.gpu_model import POLICY
from benchmarks.common.small_models import Batch

__all__ = ["BY_HAND", "ByHand"]


@dataclass
class ByHand:
    """A model that trains as a compiled one does."""

    module: nn.Module
    forward: Callable[[Batch], Tensor]

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return list(self.module.parameters())

    def forward_backward(self, **batch: Tensor) -> None:
        """Add to the gradients."""
        self.forward(batch).backward()


def autocast(model: nn.Module, mesh: DeviceMesh, compiled: bool) -> ByHand:
    """Weights in float32, products in bfloat16."""
    device = mesh.device_type
    model = model.to(device)
    called = torch.compile(model) if compiled else model

    def forward(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = called(**{key: value.to(device) for key, value in batch.items()}).loss
        return loss

    return ByHand(model, forward)


def fsdp2(model: nn.Module, mesh: DeviceMesh, compiled: bool) -> ByHand:
    """All of a block computed in bfloat16, as our plans are; each layer is a unit of its own."""
    device = mesh.device_type
    model = model.to(device)
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    for layer in layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)

    def forward(batch: Batch) -> Tensor:
        loss: Tensor = model(**{key: value.to(device) for key, value in batch.items()}).loss
        return loss

    return ByHand(model, forward)


BY_HAND: dict[str, Callable[[nn.Module, DeviceMesh, bool], ByHand]] = {"autocast": autocast, "FSDP2": fsdp2}

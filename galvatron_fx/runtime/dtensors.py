"""Local tensors as the DTensors that people see."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def lie_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A local gradient as its parameter lies."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

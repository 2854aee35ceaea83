"""Kernels of what follows a step: the optimizer's update of one parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from galvatron_fx.ir.cluster.curves import OperatorCurve
from galvatron_fx.ir.cluster.device import UPDATE
from galvatron_fx.profiling.fit import fit_operator
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.timing import Rounds, Task
from galvatron_fx.runtime.local_updates import watch_updates

__all__ = ["UPDATE", "measure_updates"]

_ELEMENTS = (64, 4096, 65536, 2**19, 2**22)  # of a parameter
_ON_GPUS = (2**24, 2**26)  # beside these: smaller ones take no more than launching their kernels
_PARAMETERS = 4
_AT_ONCE = 2**26  # elements on GPUs, where small parameters are updated together, as they are beside a large one


def measure_updates(ranks: Ranks, seconds: float, slowdown: float, done: Callable[[float], None]) -> OperatorCurve:
    """Seconds of AdamW's step by the bytes of a parameter, float32, parameters being as a compiled model has them."""
    sizes = _ELEMENTS if ranks.device_type == "cpu" else (*_ELEMENTS, *_ON_GPUS)
    times = Rounds(ranks, [_task(ranks, elements) for elements in sizes], slowdown=slowdown).run(seconds, 1, done)
    moved = [4.0 * elements for elements in sizes]
    each = [spent / _count(ranks, elements) for spent, elements in zip(times, sizes, strict=True)]
    return fit_operator(UPDATE, "float32", [0.0] * len(moved), moved, each)


def _task(ranks: Ranks, elements: int) -> Task:
    def prepare() -> Callable[[int], None]:
        parameters = [
            nn.Parameter(_laid_out(ranks, torch.ones(elements, dtype=torch.float32)))
            for _ in range(_count(ranks, elements))
        ]
        watch_updates(nn.ParameterList(parameters))
        for parameter in parameters:
            parameter.grad = _laid_out(ranks, torch.full((elements,), 1e-3))
        optimizer = torch.optim.AdamW(parameters, foreach=None if ranks.device_type == "cpu" else True)

        def run(times: int) -> None:
            for _ in range(times):
                optimizer.step()

        return run

    return prepare


def _count(ranks: Ranks, elements: int) -> int:
    """How many parameters of so many elements are updated."""
    if ranks.device_type == "cpu":
        return _PARAMETERS
    return max(1, min(8 * _PARAMETERS, _AT_ONCE // elements))


def _laid_out(ranks: Ranks, tensor: Tensor) -> Tensor:
    """A DTensor, as the parameters of a compiled model are; plain where there are no process groups."""
    local = tensor.to(ranks.device_type)
    if not dist.is_initialized():
        return local
    return DTensor.from_local(local, ranks.mesh, [Replicate()] * ranks.mesh.ndim, run_check=False)

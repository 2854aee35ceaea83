"""Which of torch's libraries multiplies matrices: as is said, or the one that is faster here."""

from __future__ import annotations

import os
import time
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.kernels.onednn import has_onednn, on_onednn
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.profiling.ranks import Ranks

__all__ = ["CHOICES", "VARIABLE", "fastest_kernels", "kernel_choice"]

VARIABLE = "GALVATRON_FX_KERNELS"
CHOICES = ("auto", "torch")

_SIZE = 384  # rows and columns: 1 ms a product
_TURNS = 5
_CLEARLY = 0.8  # of the time: less would be within what two measurements differ by


def kernel_choice(kernels: str | None) -> str:
    """``kernels``, or where it is None what the environment variable says: "auto" or "torch". InputError for others."""
    choice, source = (os.environ.get(VARIABLE, "auto"), VARIABLE) if kernels is None else (kernels, "kernels")
    if choice not in CHOICES:
        raise InputError(f"{source} is {choice!r}: use one of {', '.join(map(repr, CHOICES))}")
    return choice


def fastest_kernels(mesh: DeviceMesh, kernels: str | None = None) -> Kernels:
    """The kernels for ``mesh``: the first rank measures once, for 30 ms, and tells the others. Every rank calls it.

    ``kernels``: see :func:`kernel_choice`; of "torch" nothing is measured, and torch's own run.
    """
    choice = kernel_choice(kernels)
    if mesh.device_type != "cpu":
        return Kernels(mesh.device_type)
    ranks = Ranks(mesh)
    is_faster = ranks.index == 0 and choice == "auto" and _onednn_is_faster(torch.get_num_threads())
    return Kernels(onednn=ranks.first(float(is_faster)) > 0)


@cache
def _onednn_is_faster(num_threads: int) -> bool:
    """With so many threads, the number of now; for products as forward has them, and both of backward."""
    if not has_onednn():
        return False
    x = torch.ones(_SIZE, _SIZE, dtype=torch.float32)
    operands = ((x, x.t()), (x, x), (x.t(), x))
    plain = torch.ops.aten.mm.default
    spec = TensorSpec((_SIZE, _SIZE), torch.float32)
    targets = (plain, on_onednn(plain, (spec, spec)))
    least_s = dict.fromkeys(targets, float("inf"))
    with torch.no_grad():
        for _ in range(_TURNS):
            for target in targets:
                start_s = time.perf_counter()
                for left, right in operands:
                    target(left, right)
                least_s[target] = min(least_s[target], time.perf_counter() - start_s)
    return least_s[targets[1]] < _CLEARLY * least_s[plain]

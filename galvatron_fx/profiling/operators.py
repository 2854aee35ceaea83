"""Curves of all operators, measured by all ranks at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from galvatron_fx.ir.cluster.curves import OperatorCurve
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.profiling.elementwise import elementwise_kernels
from galvatron_fx.profiling.fit import fit_operator
from galvatron_fx.profiling.kernels import VIEW, Kernel
from galvatron_fx.profiling.products import attention_kernels, product_kernels
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.tensors import Pool
from galvatron_fx.profiling.timing import Rounds, Turns

__all__ = ["Operators", "all_kernels", "measure_operators", "timed"]

_PLACES = 2**20  # more than there are in any pool


def all_kernels(pool: Pool, dtypes: Sequence[torch.dtype]) -> list[Kernel]:
    """Products in each of ``dtypes``, and all else in the first of them."""
    products = [product for dtype in dtypes for product in product_kernels(pool, dtype)]
    return [*products, *attention_kernels(pool, dtypes[0]), *elementwise_kernels(pool, dtypes[0])]


def timed(ranks: Ranks, asked: Sequence[Kernel], kernels: Kernels, slowdown: float) -> Rounds | Turns:
    """What times all that is ``asked``, as ``kernels`` run it: in turns, but on GPUs, which run behind their calls."""
    if kernels.device_type != "cpu":
        return Rounds(ranks, [partial(kernel.prepared, kernels) for kernel in asked], slowdown=slowdown)
    places = random.Random(0)
    calls = [kernel.once(kernels, places.randrange(_PLACES)) for kernel in asked]
    return Turns(ranks, calls, slowdown)


@dataclass(frozen=True)
class Operators:
    """What was measured: ``curves``; the seconds of a view; by dtype the most flops a second of any product."""

    curves: list[OperatorCurve]
    view_s: float
    flops_per_s: dict[str, float]


def measure_operators(
    ranks: Ranks,
    asked: Sequence[Kernel],
    kernels: Kernels,
    seconds: float,
    slowdown: float,
    done: Callable[[float], None],
) -> Operators:
    """Measure all that is ``asked``, as ``kernels`` run it, and fit curves by kind and dtype; ``slowdown`` as of
    :class:`Rounds`.
    """
    with torch.no_grad():
        costs = [kernel.cost(kernels) for kernel in asked]
        times = timed(ranks, asked, kernels, slowdown).run(seconds, 1, done)
    groups: dict[tuple[str, str], list[int]] = {}
    for i, kernel in enumerate(asked):
        groups.setdefault((kernel.kind, kernel.dtype), []).append(i)
    view_s = 0.0
    curves = []
    for (kind, dtype), rows in groups.items():
        if kind == VIEW:
            view_s = times[rows[0]]
            continue
        flops = [float(costs[i].flops) for i in rows]
        moved = [float(costs[i].read_bytes + costs[i].written_bytes) for i in rows]
        # Only products of matrices have flops that bytes do not tell.
        depends = "matmul" in kind or kind.startswith("attention")
        curves.append(
            fit_operator(kind, dtype, flops if depends else [0.0] * len(rows), moved, [times[i] for i in rows])
        )
    rates: dict[str, float] = {}
    for kernel, cost, spent in zip(asked, costs, times, strict=True):
        if kernel.kind == "matmul":
            rates[kernel.dtype] = max(rates.get(kernel.dtype, 0.0), float(cost.flops) / spent)
    return Operators(curves, view_s, rates)

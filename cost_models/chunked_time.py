"""What a device does in a collective that travels in chunks while matrices are multiplied, as events of its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch

from cost_models.bundles import start_s
from cost_models.collectives import collective_s
from cost_models.streams import Event, Start, Wait, Work
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED, all_gather_matmul, matmul_all_reduce, products_of
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.plan.prediction import Cause

__all__ = ["chunked_events"]

aten = torch.ops.aten


def chunked_events(
    call: OpCall, layout: Layout, cluster: Cluster, local: Cause, call_s: Callable[[OpCall], float]
) -> tuple[Event, ...]:
    """Return what a call of :data:`galvatron_fx.ir.graph.chunked_collectives.CHUNKED` does, in order.

    ``local``: the cause of its computing; ``call_s``: the seconds of a product or sum of one chunk.
    """
    stream = call.args[-1]
    cause = Cause(CHUNKED[call.target].__name__, layout.merged_axes[stream].axes)
    axes = tuple(cluster.axes[index] for index in cause.axes)
    steps = call.args[3] if call.target is matmul_all_reduce else prod(axis.size for axis in axes)
    multiply = [Work(call_s(product), local) for product in _products(call, steps)]

    def sent(kind: str, size_bytes: int) -> Event:
        return Start(float(collective_s(kind, float(size_bytes), axes)), cause, stream, start_s(kind, axes))

    if call.target is matmul_all_reduce:
        chunk = sent("all_reduce", call.output.size_bytes // steps)
        return *(event for _ in range(steps) for event in (*multiply, chunk)), Wait(stream, 0)
    if call.target is all_gather_matmul:
        ahead = sent("rotate", call.inputs[0].size_bytes)
        return *(event for _ in range(steps - 1) for event in (ahead, *multiply, Wait(stream, 0))), *multiply
    result = call.output
    add = Work(call_s(OpCall(aten.add.Tensor, (result, result), (), (result, result), (result,))), local)
    onward = sent("rotate", result.size_bytes)
    return *multiply, *(event for _ in range(steps - 1) for event in (onward, *multiply, Wait(stream, 0), add))


def _products(call: OpCall, steps: int) -> Iterator[OpCall]:
    """The products of one of so many steps."""
    parts = 1 if call.target is all_gather_matmul else steps
    for x, weight, bias in products_of(call.target, call.args):
        part = TensorSpec((x.shape[0] // parts, x.shape[1]), x.dtype)
        factor = TensorSpec(weight.shape, weight.dtype)
        result = TensorSpec((part.shape[0], weight.shape[1]), x.dtype)
        if bias is None:
            yield OpCall(aten.mm.default, (part, factor), (), (part, factor), (result,))
        else:
            row = TensorSpec(bias.shape, bias.dtype)
            yield OpCall(aten.addmm.default, (row, part, factor), (), (row, part, factor), (result,))

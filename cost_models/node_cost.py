"""What the nodes of a graph cost: formulas in their records, and numbers at the sizes of the graph."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import fx

from cost_models.ops import TensorFacts, op_cost, reads_per_element, writes_rows
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import OpCall, op_call
from galvatron_fx.ir.graph.symbols import Sizes, value_at

__all__ = ["call_cost", "call_formula", "cost_at", "moved_bytes", "node_cost", "shown_cost"]

_MOST_KEPT = 1 << 16


def node_cost(node: fx.Node, sizes: Sizes | None = None) -> OpCost:
    """Return the numbers of the cost in a node's record, at the ``sizes`` of its graph.

    A node that was written, or given other shapes, since costs were annotated is of one plan at one size. Its cost is
    a number, which is written into its record here, by the same :func:`cost_models.ops.op_cost`.
    """
    cost = shown_cost(node)
    if meta_of(node).cost is None:
        set_meta(node, meta_of(node).having(cost=cost))
    return cost_at(cost, sizes)


def shown_cost(node: fx.Node) -> OpCost:
    """Return the cost in a node's record, a formula where it is one, or what would be written there."""
    record = meta_of(node)
    if record.cost is not None:
        return record.cost
    cost = call_cost(op_call(node))
    return cost if record.filled == 1 else replace(cost, flops=round(cost.flops * record.filled))


@lru_cache(maxsize=_MOST_KEPT)
def cost_at(cost: OpCost, sizes: Sizes | None) -> OpCost:
    """Return the exact numbers of formulas at ``sizes``; equal ones are evaluated once.

    ``sizes``: None for numbers, which stay. Raises InputError where a formula is no whole number there.
    """
    if sizes is None:
        return cost
    return OpCost(*(value_at(part, sizes) for part in (cost.flops, cost.read_bytes, cost.written_bytes)))


@lru_cache(maxsize=_MOST_KEPT)
def call_formula(call: OpCall) -> OpCost:
    """Return the cost of a call in batch ``b`` and sequence ``s``, as far as its sizes are known as expressions."""
    return _cost(*_facts(call, symbolic=True))


@lru_cache(maxsize=_MOST_KEPT)
def call_cost(call: OpCall) -> OpCost:
    """Return the cost of a call at its sizes as numbers."""
    return _cost(*_facts(call, symbolic=False))


@lru_cache(maxsize=_MOST_KEPT)
def moved_bytes(call: OpCall) -> tuple[int, ...]:
    """Return the bytes read and written for each input of a call, then for each output (0 for an absent one).

    They add up to the bytes of the call's cost, unless it is free. A rank that holds a part of a tensor moves that
    part of its bytes. So search prices placements by them.
    """
    outputs = [spec for spec in call.outputs if spec is not None]
    reads = reads_per_element(call.target, tuple(x.dtype for x in call.inputs), tuple(x.dtype for x in outputs))
    for_inputs = [size * spec.numel for size, spec in zip(reads, call.inputs, strict=False)]
    if writes_rows(call.target):
        return (*for_inputs[:-1], for_inputs[-1] + call.inputs[-1].size_bytes, *(0 for _ in call.outputs))
    for_outputs = iter(reads[len(call.inputs) :])
    return (
        *for_inputs,
        *(0 if spec is None else next(for_outputs) * spec.numel + spec.size_bytes for spec in call.outputs),
    )


@lru_cache(maxsize=_MOST_KEPT)
def _cost(target: Any, args: Any, kwargs: Any, inputs: Any, outputs: Any) -> OpCost:
    """Calls that are equal but for their sizes as numbers have one formula."""
    return op_cost(target, args, dict(kwargs), inputs, outputs)


def _facts(call: OpCall, symbolic: bool) -> tuple[Any, ...]:
    """A call as :func:`cost_models.ops.op_cost` takes it."""

    def convert(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return TensorFacts(value.symbolic if symbolic else value.shape, value.dtype)
        return tuple(map(convert, value)) if isinstance(value, tuple) else value

    outputs = tuple(convert(spec) for spec in call.outputs if spec is not None)
    return call.target, convert(call.args), convert(call.kwargs), convert(call.inputs), outputs

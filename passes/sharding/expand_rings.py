"""Write out the steps of ring attention, when all axes are lowered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.local_program import placements_of, record_program
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.graph.rewrite import copied
from passes.analysis.repeated_heads import repeated_heads
from passes.sharding.emitter import Emitter
from passes.sharding.rules import OpRule

aten = torch.ops.aten


@dataclass(frozen=True)
class ExpandRings:
    """Write a step for each rank of a ring, with what travels between steps; ``degrees``: ranks of each mesh column.

    Rewrite: ``out, sums = ring_attention(q, k, v, ...)`` on two ranks -> ``k2, v2 = rotate(k, 0), rotate(v, 0);
    out, sums = ring_step(q, k, v, None, None, ...); out, sums = ring_step(q, k2, v2, out, sums, ...)``
    What is needed next is sent before the products of a step, so that it travels beside them.
    """

    degrees: Sequence[int]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return a graph without rings as calls; ``graph`` stays as it is."""
        rings = [node for target in c.RINGS for node in graph.graph.find_nodes(op="call_function", target=target)]
        if not rings:
            return graph
        result = copied(graph)
        for target, write in _STEPS.items():
            for node in result.graph.find_nodes(op="call_function", target=target):
                self._expand(result.graph, node, write)
        result.recompile()
        return result

    def _expand(self, graph: fx.Graph, node: fx.Node, write: Callable[..., list[fx.Node]]) -> None:
        axis = int(node.args[-1])  # type: ignore[arg-type]
        emitter = Emitter(graph, meta_of(node).having(placements=(), step=None), axis, self.degrees[axis], _NO_RULE)
        with graph.inserting_before(node):
            values = _of_single_heads(emitter, node, write)
        results = {}
        for picked in [user for user in node.users if is_getitem(user)]:
            value = values[int(picked.args[1])]  # type: ignore[arg-type]
            results[value] = placements_of(picked)
            set_meta(value, meta_of(value).having(value=meta_of(picked).value))  # plans keep it by that
            picked.replace_all_uses_with(value)
            graph.erase_node(picked)
        graph.erase_node(node)
        record_program(c.ring_step.__name__, emitter.written, results, len(self.degrees))


_NO_RULE = OpRule((), ())


def _of_single_heads(e: Emitter, node: fx.Node, write: Callable[..., list[fx.Node]]) -> list[fx.Node]:
    """Let heads that the model repeats travel once: kernels know groups of heads. Of the gradients, which the model
    adds up over each group, every head has its share.
    """
    args, specs = list(node.args[:-1]), list(meta_of(node).specs)
    first = 1 if node.target is c.ring_attention else 2
    repeated = [repeated_heads(args[at]) for at in (first, first + 1)]
    if repeated[0] is None or repeated[1] is None or repeated[0].times != repeated[1].times:
        return write(e, tuple(specs), *args)
    sources, times = [_single(e, each.source) for each in repeated if each is not None], repeated[0].times
    args[first : first + 2] = sources
    if node.target is c.ring_attention:
        return write(e, tuple(specs), *args)
    specs[1:] = [meta_of(source).spec for source in sources]
    to_query, *to_heads = write(e, tuple(specs), *args)
    return [to_query, *(_shared(e, x, times) for x in to_heads)]


def _single(e: Emitter, x: fx.Node) -> fx.Node:
    """[batch, heads, 1, ...] without the dim for what stands in a row."""
    (batch, heads, _, *rest), dtype = meta_of(x).spec.shape, meta_of(x).spec.dtype
    return e.emit(aten.squeeze.dim, (x, 2), TensorSpec((batch, heads, *rest), dtype))


def _shared(e: Emitter, x: fx.Node, times: int) -> fx.Node:
    """Each head ``times`` in a row, divided by as much."""
    (batch, heads, *rest), dtype = meta_of(x).spec.shape, meta_of(x).spec.dtype
    share = e.emit(aten.div.Scalar, (x, times), meta_of(x).spec)
    single = e.emit(aten.unsqueeze.default, (share, 2), TensorSpec((batch, heads, 1, *rest), dtype))
    shape = (batch, heads, times, *rest)
    expanded = e.emit(aten.expand.default, (single, list(shape)), TensorSpec(shape, dtype))
    whole = (batch, heads * times, *rest)
    return e.emit(aten.reshape.default, (expanded, list(whole)), TensorSpec(whole, dtype))


def _forward(
    e: Emitter,
    specs: tuple[TensorSpec, TensorSpec],
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    mask: fx.Node | None,
    is_causal: bool,
    scale: float | None,
) -> list[fx.Node]:
    out: fx.Node | None = None
    sums: fx.Node | None = None
    for step in range(e.degree):
        is_last = step == e.degree - 1
        following = [] if is_last else [_rotated(e, x) for x in (key, value)]
        made = (specs[0] if step == 0 or is_last else _wide(specs[0])), specs[1]
        args = (query, key, value, out, sums, mask, step, is_last, is_causal, scale, e.axis)
        out, sums = _outputs(e, c.ring_step, args, made)
        key, value = following or (key, value)
    assert out is not None and sums is not None
    return [out, sums]


def _backward(
    e: Emitter,
    specs: tuple[TensorSpec, TensorSpec, TensorSpec],
    grad: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    out: fx.Node,
    sums: fx.Node,
    mask: fx.Node | None,
    is_causal: bool,
    scale: float | None,
) -> list[fx.Node]:
    """The gradients of keys and values follow these around, a step behind, and come home last."""
    to_query: fx.Node | None = None
    own: list[fx.Node] = []
    travelling: list[fx.Node] = []
    for step in range(e.degree):
        following = [] if step == e.degree - 1 else [_rotated(e, x) for x in (key, value)]
        args = (grad, query, key, value, out, sums, to_query, mask, step, is_causal, scale, e.axis)
        to_query, *parts = _outputs(e, c.ring_step_backward, args, tuple(map(_wide, specs)))
        if step == 0:
            own = parts
        else:
            sent = [_sum(e, *pair) for pair in zip(travelling, parts, strict=True)] if travelling else parts
            travelling = [_rotated(e, x) for x in sent]
        key, value = following or (key, value)
    assert to_query is not None
    gradients = [to_query, *(_sum(e, *pair) for pair in zip(own, travelling, strict=True))]
    return [_cast(e, x, spec) for x, spec in zip(gradients, specs, strict=True)]


_STEPS: dict[Any, Callable[..., list[fx.Node]]] = {
    c.ring_attention: _forward,
    c.ring_attention_backward: _backward,
}


def _wide(spec: TensorSpec) -> TensorSpec:
    """A sum of parts of ``spec``."""
    return replace(spec, dtype=torch.promote_types(spec.dtype, torch.float32))


def _rotated(e: Emitter, x: fx.Node) -> fx.Node:
    return e.emit(c.rotate, (x, e.axis), meta_of(x).spec)


def _outputs(e: Emitter, target: Any, args: tuple[Any, ...], specs: tuple[TensorSpec, ...]) -> list[fx.Node]:
    step = e.emit_multi(target, args, specs)
    return [e.emit(operator.getitem, (step, position), spec) for position, spec in enumerate(specs)]


def _sum(e: Emitter, x: fx.Node, y: fx.Node) -> fx.Node:
    return e.emit(aten.add.Tensor, (x, y), meta_of(x).spec)


def _cast(e: Emitter, x: fx.Node, spec: TensorSpec) -> fx.Node:
    same = meta_of(x).spec.dtype == spec.dtype
    return x if same else e.emit(aten._to_copy.default, (x,), spec, dtype=spec.dtype)

"""Price every node with a formula in batch and sequence."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from cost_models.ops import FREE, OpCost, TensorFacts, op_cost
from galvatron_fx.ir.annotations import TensorSpec, facts, set_facts
from passes.sharding.op_call import OpCall, op_call


@dataclass(frozen=True)
class AnnotateCosts:
    """Give every compute node its cost: flops, bytes read and bytes written, as sympy expressions in ``b`` and ``s``.

    Rewrite: facts with ``cost=None`` -> facts with an :class:`cost_models.ops.OpCost`; the graph is unchanged.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Annotate ``graph`` in place and return it; equal calls are priced once."""
        known: dict[OpCall, OpCost] = {}
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                set_facts(node, facts(node).having(cost=FREE))
                continue
            call = op_call(node)
            if call not in known:
                known[call] = symbolic_cost(call)
            set_facts(node, facts(node).having(cost=known[call]))
        return graph


def symbolic_cost(call: OpCall) -> OpCost:
    """The cost of a call in terms of the symbolic sizes of its tensors."""

    def convert(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return TensorFacts(value.symbolic, value.dtype)
        if isinstance(value, tuple):
            return [convert(item) for item in value]
        return value

    return op_cost(
        call.target,
        tuple(convert(arg) for arg in call.args),
        {key: convert(value) for key, value in call.kwargs},
        [TensorFacts(s.symbolic, s.dtype) for s in call.inputs],
        [TensorFacts(s.symbolic, s.dtype) for s in call.outputs if s is not None],
    )


def total_cost(graph: fx.GraphModule) -> OpCost:
    """The sum over all annotated nodes: the formula of a whole training step."""
    costs = [cost for n in graph.graph.nodes if n.op == "call_function" and (cost := facts(n).cost) is not None]
    return OpCost(
        sympy.Add(*(c.flops for c in costs)),
        sympy.Add(*(c.read_bytes for c in costs)),
        sympy.Add(*(c.written_bytes for c in costs)),
    )

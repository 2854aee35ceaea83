"""Specs of single nodes, whatever they compute: what may stand in a graph, with which facts, in which order."""

from __future__ import annotations

import operator

from torch import fx
from torch._ops import OpOverload

from galvatron_fx.ir.graph import collectives
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.host_copies import arrived
from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.precision import CASTS
from galvatron_fx.ir.graph.random_ops import random_uniform

_PYTHON_TARGETS = (operator.getitem, random_uniform, *CASTS)
_LOWERED_TARGETS = (*_PYTHON_TARGETS, *collectives.COLLECTIVES, *collectives.RANK_LOCAL)
_LOWERED_TARGETS += (arrived, fold_gradient, *collectives.RINGS, *collectives.RING_STEPS, *CHUNKED)
_OPS = ("placeholder", "get_attr", "call_function")


def is_flat(node: fx.Node) -> str | None:
    """Calls of methods and modules have no rule, cost or facts: capture leaves none, and a pass must not write any."""
    return None if node.op in _OPS else f"is a {node.op} node, where only {', '.join(_OPS)} and output may stand"


def is_captured(node: fx.Node) -> str | None:
    """It has facts, and what it calls is known to rules and costs."""
    if not has_meta(node):
        return "has no facts"
    if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target not in _PYTHON_TARGETS:
        return f"calls {node.target}, which is no ATen operator"
    return None


def is_blocked(node: fx.Node) -> str | None:
    """It belongs to a block."""
    outside = node.op == "call_function" and meta_of(node).block < 0
    return "belongs to no layer block" if outside else None


def is_annotated(node: fx.Node) -> str | None:
    """It is priced."""
    unpriced = node.op == "call_function" and meta_of(node).cost is None
    return "has no cost: run AnnotateCosts behind the pass" if unpriced else None


def is_lowered(node: fx.Node) -> str | None:
    """It has facts, and calls an operator, a collective, or what a pass has recorded (bundles, bound collectives)."""
    if not has_meta(node):
        return "has no facts"
    is_known = isinstance(node.target, OpOverload) or node.target in _LOWERED_TARGETS
    if node.op == "call_function" and not is_known and meta_of(node).step is None:
        return f"calls {node.target}, which is neither an ATen operator nor a collective"
    return None


def is_forward_first(node: fx.Node) -> str | None:
    """Forward takes nothing from backward."""
    if node.op != "call_function" or meta_of(node).phase != "forward":
        return None
    late = [n.name for n in node.all_input_nodes if n.op == "call_function" and meta_of(n).phase == "backward"]
    return f"is of the forward phase but takes {late} from backward" if late else None

"""What must hold at each stage of a graph; checked after every pass."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx
from torch._ops import OpOverload

from galvatron_fx.errors import VerifierError
from galvatron_fx.ir import collectives
from galvatron_fx.ir.annotations import facts, has_facts, output_ports, ports
from galvatron_fx.ir.precision import CASTS
from galvatron_fx.ir.random_ops import random_uniform

Check = Callable[[fx.Node], str | None]

_PYTHON_TARGETS = (operator.getitem, random_uniform, *CASTS)
_LOWERED_TARGETS = (*_PYTHON_TARGETS, *collectives.COLLECTIVES, *collectives.RANK_LOCAL)


_OPS = ("placeholder", "get_attr", "call_function")


def _is_flat(node: fx.Node) -> str | None:
    """Calls of methods and modules have no rule, cost or facts: capture leaves none, and a pass must not write any."""
    return None if node.op in _OPS else f"is a {node.op} node, where only {', '.join(_OPS)} and output may stand"


def _is_captured(node: fx.Node) -> str | None:
    if not has_facts(node):
        return "has no facts"
    if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target not in _PYTHON_TARGETS:
        return f"calls {node.target}, which is no ATen operator"
    return None


def _is_blocked(node: fx.Node) -> str | None:
    outside = node.op == "call_function" and facts(node).block < 0
    return "belongs to no layer block" if outside else None


def _is_annotated(node: fx.Node) -> str | None:
    return "has no cost" if node.op == "call_function" and facts(node).cost is None else None


def _is_lowered(node: fx.Node) -> str | None:
    if not has_facts(node):
        return "has no facts"
    if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target not in _LOWERED_TARGETS:
        return f"calls {node.target}, which is neither an ATen operator nor a collective"
    return None


def _is_forward_first(node: fx.Node) -> str | None:
    if node.op != "call_function" or facts(node).phase != "forward":
        return None
    late = [n.name for n in node.all_input_nodes if n.op == "call_function" and facts(n).phase == "backward"]
    return f"is of the forward phase but takes {late} from backward" if late else None


STAGES: dict[str, tuple[Check, ...]] = {
    "captured": (_is_flat, _is_captured, _is_forward_first),
    "blocked": (_is_flat, _is_captured, _is_forward_first, _is_blocked),
    "annotated": (_is_flat, _is_captured, _is_forward_first, _is_blocked, _is_annotated),
    "lowered": (_is_flat, _is_lowered, _is_forward_first),
}


def verify(graph: fx.GraphModule, stage: str, after: str) -> None:
    """Check that ``graph`` is well formed and of ``stage`` (a key of STAGES); ``after`` names the pass that made it.

    Raises VerifierError naming the pass, the node and what is wrong with it.
    """
    try:
        graph.graph.lint()
        ports(graph), output_ports(graph)
    except (RuntimeError, ValueError) as error:
        raise VerifierError(f"after {after}: the graph is malformed: {error}") from error
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        for check in STAGES[stage]:
            problem = check(node)
            if problem is not None:
                raise VerifierError(f"after {after}: node '{node.name}' ({node.target}) {problem}")

"""Drop nodes that compute nothing: aliases, copies that change nothing, whole-range slices, dead code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.annotations import facts

aten = torch.ops.aten

# A functional graph has no writes, so an alias or a copy of a value is the value. (The lowering uses ``reshape`` for
# ``view``, so memory formats need not be kept either.)
_ALIASES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}


@dataclass(frozen=True)
class CleanGraph:
    """Remove no-ops, so that costs, blocks and rules see computation only.

    Rewrite: ``y = detach(x); z = mul(y, 2)`` -> ``z = mul(x, 2)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Clean ``graph`` in place and return it."""
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and _is_noop(node):
                node.replace_all_uses_with(node.args[0])
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def eliminate_dead_code(graph: fx.GraphModule) -> None:
    """Erase nodes that nothing uses (random ones too: nothing can see them)."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.graph.erase_node(node)


def _is_noop(node: fx.Node) -> bool:
    if node.target in _ALIASES:
        return True
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is aten._to_copy.default:
        return facts(node).spec.dtype == facts(node.args[0]).spec.dtype and "device" not in node.kwargs
    same_shape_is_noop = (aten.slice.Tensor, aten.view.default, aten._unsafe_view.default, aten.expand.default)
    if node.target in same_shape_is_noop:
        return facts(node).spec.shape == facts(node.args[0]).spec.shape
    return False

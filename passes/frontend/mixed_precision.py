"""Mixed precision: casts of parameters in front of their blocks, and of gradients in front of their reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.precision import cast_parameter, precision
from galvatron_fx.ir.graph.rewrite import cast_behind, set_output, with_dtype, write_call


@dataclass(frozen=True)
class MixedPrecision:
    """Write the casts of the policy that the graph was captured with into it.

    Capture shows a model its parameters in the dtype that it computes in, so autograd has differentiated just that.
    Here parameters get their own dtype back, and each block that uses one casts it: a cast is an elementwise operator,
    so a shard can be cast and then gathered, at a fraction of the bytes. Each term of a gradient is cast to the dtype
    of the reduction where it is made; tied parameters have a term for every use.

    Rewrite: ``y = mm(x, t(w)); dw = mm(dy, x)`` ->
    ``w_1 = cast_parameter(w, bfloat16); y = mm(x, t(w_1)); dw = cast_gradient(mm(dy, x), float32)``.

    Runs when blocks are found. Without a policy the graph stays as it is.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        graph_precision = precision(graph)
        if graph_precision is None:
            return graph
        for position, (output, maker) in enumerate(output_ports(graph)):
            if output.kind == "grad" and output.name in graph_precision.dtypes and maker is not None:
                _cast_terms(graph, position, maker, graph_precision.reduced(meta_of(maker).spec.dtype))
        for port, node in ports(graph):
            if port.kind == "param" and port.name in graph_precision.dtypes:
                _cast_for_blocks(graph, node, graph_precision.dtypes[port.name])
        graph.recompile()
        return graph


# ---- parameters ----------------------------------------------------------------------------------------------------


def _cast_for_blocks(graph: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> None:
    """Cast a parameter in each block that uses it, in front of the first use there."""
    shown = meta_of(node).spec
    if shown.dtype == dtype:
        return
    set_meta(node, meta_of(node).having(specs=(with_dtype(shown, dtype),)))
    users: dict[int, list[fx.Node]] = {}
    order = {user: i for i, user in enumerate(graph.graph.nodes) if user in node.users}
    for user in sorted(node.users, key=order.__getitem__):
        # What returns a parameter itself takes the cast of its first use.
        block = meta_of(user).block if user.op == "call_function" else min(users, default=0)
        users.setdefault(block, []).append(user)
    for block, members in users.items():
        first = members[0]
        with graph.graph.inserting_before(first):
            cast = write_call(graph.graph, cast_parameter, (node, shown.dtype))
        like = meta_of(first if first.op == "call_function" else node)
        set_meta(cast, like.having(specs=(shown,), block=block, multi_output=False, cost=None))
        for user in members:
            user.replace_input_with(node, cast)


# ---- gradients -----------------------------------------------------------------------------------------------------


def _cast_terms(graph: fx.GraphModule, position: int, gradient: fx.Node, dtype: torch.dtype) -> None:
    """Cast what adds up to a gradient, so that it adds up in the dtype of the reduction."""
    pending: list[tuple[fx.Node, fx.Node]] = [(gradient, graph.graph.output_node())]
    while pending:
        node, taker = pending.pop()
        spec = meta_of(node).spec
        if spec.dtype == dtype:
            continue
        if node.op == "call_function" and node.target is torch.ops.aten.add.Tensor and _is_sum(node):
            set_meta(node, meta_of(node).having(specs=(with_dtype(spec, dtype),)))
            pending += [(source, node) for source in dict.fromkeys(input_nodes(node))]
        elif taker.op == "output":
            set_output(graph, position, cast_behind(graph, node, dtype))
        else:
            taker.replace_input_with(node, cast_behind(graph, node, dtype))


def _is_sum(node: fx.Node) -> bool:
    """Whether a node only adds up two terms of a gradient."""
    sum_spec, terms = meta_of(node).spec, [meta_of(term).spec for term in input_nodes(node)]
    alike = len(terms) == 2 and all((spec.shape, spec.dtype) == (sum_spec.shape, sum_spec.dtype) for spec in terms)
    return alike and not node.kwargs and len(node.users) == 1

"""What values of a joint graph come from: inputs alone, the batch, a parameter, or the gradient of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.precision import cast_gradient
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.ir.kernels.experts import shadows
from galvatron_fx.ir.plan.strategy import original_name

aten = torch.ops.aten

# Operators that a sum passes through, so that gradients can be added up in front of them.
LINEAR_OPS = (
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
    aten._to_copy.default,
    cast_gradient,
)
_ADDING_OPS = (aten.add.Tensor, *LINEAR_OPS)


def input_only(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes that follow from inputs and constants, not from parameters or gradients."""
    free = {node for port, node in ports(graph) if port.kind not in ("param", "tangent")}
    for node in graph.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(n in free for n in input_nodes(node))):
            free.add(node)
    return free


def input_only_ops(graph: fx.GraphModule) -> set[fx.Node]:
    """Operators of forward that every rank could run, as it has the inputs."""
    return {node for node in input_only(graph) if node.op == "call_function" and meta_of(node).phase == "forward"}


def made_of_parameters(graph: fx.GraphModule) -> set[fx.Node]:
    """Forward operators that depend on parameters and on nothing else."""
    parameters = {node for port, node in ports(graph) if port.kind == "param"}
    alone: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == "forward":
            sources = input_nodes(node)
            knows_all = bool(sources) or node.target is shadows  # of experts, which the runtime names
            if knows_all and all(source in parameters or source in alone for source in sources):
                alone.add(node)
    return alone


def ancestors(nodes: Sequence[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """``nodes`` and what they are made of, as far as it lies within ``within``."""
    reachable: set[fx.Node] = set()
    pending = [node for node in nodes if node in within]
    while pending:
        node = pending.pop()
        if node not in reachable:
            reachable.add(node)
            pending += [n for n in input_nodes(node) if n in within]
    return reachable


def sums_over_batch(graph: fx.GraphModule) -> set[fx.Node]:
    """Backward values without a batch that are made of values with one: what each part of a batch adds to a sum."""
    free = input_only(graph)
    varies: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and node not in free:
            carries = any(spec is not None and spec.dim_of(BATCH) is not None for spec in meta_of(node).specs)
            if carries or any(source in varies for source in input_nodes(node)):
                varies.add(node)
    return {
        node
        for node in varies
        if meta_of(node).phase == "backward"
        and not meta_of(node).multi_output
        and _is_batchless_float(meta_of(node).spec)
    }


def gradient_terms(graph: fx.GraphModule) -> dict[fx.Node, frozenset[fx.Node]]:
    """Backward values that do nothing but add up to gradients, each with the parameters that these are of."""
    by_name = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    returned: dict[fx.Node, set[fx.Node | None]] = {}
    for port, node in output_ports(graph):
        if node is not None:
            returned.setdefault(node, set()).add(by_name.get(port.name) if port.kind == "grad" else None)
    terms: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in reversed(graph.graph.nodes):
        if node.op != "call_function" or meta_of(node).phase != "backward" or meta_of(node).multi_output:
            continue
        calls = [user for user in node.users if user.op == "call_function"]
        if not all(user in terms and user.target in _ADDING_OPS for user in calls):
            continue
        parameters = returned.get(node, set()).union(*(terms[user] for user in calls))
        if parameters and None not in parameters:
            terms[node] = frozenset(parameter for parameter in parameters if parameter is not None)
    return terms


def crossing_terms(graph: fx.GraphModule) -> dict[fx.Node, frozenset[fx.Node]]:
    """Those of the :func:`gradient_terms` that another block takes: of parameters that several blocks use."""
    return {
        node: parameters
        for node, parameters in gradient_terms(graph).items()
        if any(user.op == "call_function" and meta_of(user).block != meta_of(node).block for user in node.users)
    }


def before_cast(graph: fx.GraphModule) -> set[fx.Node]:
    """Values of backward that serve gradients alone, in front of their cast to the dtype that they are reduced in: the
    one that a policy asks for, or the parameter's where the model computes with it in half of its bytes (autocast).
    """
    casts = {node for node in gradient_terms(graph) if _widens_half(node)}
    casts.update(graph.graph.find_nodes(op="call_function", target=cast_gradient))
    values: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op != "call_function" or meta_of(node).phase != "backward" or node in casts:
            continue
        if node.users and all(user in values or user in casts for user in node.users):
            values.add(node)
    return values


def _widens_half(node: fx.Node) -> bool:
    """Whether a node casts numbers of two bytes, whose sums are rounded however they are split, to wider ones."""
    if node.target is not aten._to_copy.default:
        return False
    narrow, wide = meta_of(input_nodes(node)[0]).spec.dtype, meta_of(node).spec.dtype
    return narrow.is_floating_point and narrow.itemsize == 2 < wide.itemsize


def _is_batchless_float(spec: TensorSpec) -> bool:
    return spec.dim_of(BATCH) is None and spec.dtype.is_floating_point


def parameter_owners(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The block of each parameter: that of its first use; copies of it in other stages belong there too."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    owners = {}
    by_name: dict[str, int] = {}
    for port, node in ports(graph):
        users = [user for user in node.users if user.op == "call_function"]
        if port.kind == "param" and users:
            first = max(meta_of(min(users, key=order.__getitem__)).block, 0)
            owners[node] = by_name.setdefault(original_name(port.name), first)
    return owners


def cache_owners(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The block of each cache that forward takes: that of its first use."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    owners = {}
    for port, node in ports(graph):
        users = [user for user in node.users if user.op == "call_function"]
        if port.kind == "cache" and users:
            owners[node] = max(meta_of(min(users, key=order.__getitem__)).block, 0)
    return owners


def owning_blocks(graph: fx.GraphModule) -> dict[str, int]:
    """The same by the parameters' own names."""
    owners = parameter_owners(graph)
    return {original_name(port.name): owners[node] for port, node in ports(graph) if node in owners}


def original_parameters(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Copies of parameters that later pipeline stages hold, each with the parameter: they lie alike."""
    by_name = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    return {node: by_name[original_name(name)] for name, node in by_name.items() if original_name(name) != name}


def gradient_parameters(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Map every node that only adds up to a parameter's gradient to that parameter."""
    by_name = {port.name: node for port, node in ports(graph) if port.kind == "param"}
    parameters: dict[fx.Node, fx.Node] = {}
    for port, node in output_ports(graph):
        if port.kind != "grad" or node is None or port.name not in by_name:
            continue
        pending = [node]
        while pending:
            current = pending.pop()
            if current.op != "call_function" or meta_of(current).multi_output or current in parameters:
                continue
            if meta_of(current).spec.shape != meta_of(by_name[port.name]).spec.shape:
                continue
            parameters[current] = by_name[port.name]
            if str(current.target).startswith("aten.add"):
                pending += [n for n in input_nodes(current) if len(n.users) == 1]
    return parameters

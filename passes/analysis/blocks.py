"""What is read off a graph about its layer blocks: how many there are, and which of them are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes, without_index
from galvatron_fx.ir.graph.random_ops import comparable_args
from passes.analysis.dataflow import parameter_owners


def num_blocks(graph: fx.GraphModule) -> int:
    """Number of blocks in an annotated graph."""
    return 1 + max((meta_of(n).block for n in graph.graph.nodes if n.op == "call_function"), default=0)


def num_values(graph: fx.GraphModule) -> tuple[int, ...]:
    """How many values each block may keep for backward; all 0 for graphs without backward."""
    counts = [0] * num_blocks(graph)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            block = max(meta_of(node).block, 0)
            counts[block] = max(counts[block], meta_of(node).value + 1)
    return tuple(counts)


def fingerprints(graph: fx.GraphModule) -> tuple[str, ...]:
    """A hash of each block's operators, sizes and wiring; equal blocks have equal fingerprints in every process.

    Blocks that use parameters of other blocks differ from these. Those that only select other elements do not: steps of
    a loop over time are equal.
    """
    members: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            members.setdefault(meta_of(node).block, []).append(node)
    keys = {node: _spec_key(meta_of(node).specs) for node in graph.graph.nodes if node.op != "output"}
    owners = parameter_owners(graph)
    return tuple(_fingerprint(members.get(i, []), keys, owners) for i in range(num_blocks(graph)))


def graph_fingerprint(graph: fx.GraphModule, block_fingerprints: Sequence[str] | None = None) -> str:
    """A hash of the whole graph: its inputs, blocks and their order; ``block_fingerprints``: its :func:`fingerprints`,
    if known.
    """
    digest = hashlib.sha256()
    for port, node in ports(graph):
        digest.update(repr((port.kind, port.name, port.requires_grad, _spec_key(meta_of(node).specs))).encode())
    for block in fingerprints(graph) if block_fingerprints is None else block_fingerprints:
        digest.update(block.encode())
    return digest.hexdigest()[:32]


def wiring(graph: fx.GraphModule) -> tuple[Any, ...]:
    """What a graph is beside its blocks' :func:`fingerprints`: its inputs and outputs but for their names, the order of
    its nodes, and what each of them reads.
    """
    place: dict[fx.Node, Any] = {}
    for port, node in ports(graph):
        place[node] = len(place), port.kind, port.requires_grad, _spec_key(meta_of(node).specs)
    wires = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            place[node] = node.target
        elif node.op == "call_function":
            wires.append((meta_of(node).block, *(place[source] for source in input_nodes(node))))
            place[node] = len(place)
    outputs = tuple((port.kind, node and place[node]) for port, node in output_ports(graph))
    return tuple(place.values()), tuple(wires), outputs


def _fingerprint(nodes: Sequence[fx.Node], keys: Mapping[fx.Node, Any], owners: Mapping[fx.Node, int]) -> str:
    number: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    for node in nodes:
        wires = tuple(number.setdefault(source, len(number)) for source in input_nodes(node))
        number.setdefault(node, len(number))
        args = without_index(node.target, comparable_args(node))
        constants = fx.map_arg((args, node.kwargs), keys.__getitem__)
        text = repr((_name(node.target), constants, wires, keys[node], meta_of(node).phase))
        block = max(meta_of(node).block, 0)
        if any(owners.get(source, block) != block for source in input_nodes(node)):
            text += ", a parameter of another block"
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _name(target: Any) -> str:
    """A name that is the same in every process: that of a function holds its address."""
    return target.__qualname__ if isinstance(target, FunctionType) else str(target)


def _spec_key(specs: tuple[TensorSpec | None, ...]) -> Any:
    return tuple((s.shape, str(s.dtype)) if s is not None else None for s in specs)

"""Write copies between a device and its host into a graph, and what waits for them."""

from __future__ import annotations

import torch
from torch import fx

from galvatron_fx.ir.graph.host_copies import arrived, from_host, to_host
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node, write_call

__all__ = ["fetch", "own_block", "send", "view_again"]

_CPU = torch.device("cpu")  # code generation says which device it is


def send(graph: fx.Graph, source: fx.Node, phase: str, block: int) -> fx.Node:
    """Copy ``source`` to the host; returns the copy as it has arrived."""
    return _round(graph, write_call(graph, to_host, (source,), name="to_host"), source, phase, block)


def fetch(graph: fx.Graph, source: fx.Node, phase: str, block: int) -> fx.Node:
    """Copy ``source`` to the device; returns the copy as it has arrived."""
    copy = write_call(graph, from_host, (source,), {"device": _CPU}, "from_host")
    return _round(graph, copy, source, phase, block)


def view_again(graph: fx.Graph, source: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Make ``source`` in backward of the copy of the memory that it is in."""
    views = []
    while source not in copies:
        views.append(source)
        source = input_nodes(source)[0]
    for view in reversed(views):
        copies[view] = copy_node(graph, view, lambda node: copies.get(node, node))
        set_meta(copies[view], meta_of(view).having(phase="backward", again=True))


def own_block(node: fx.Node) -> int:
    """The block of a node; the first for those that are of none."""
    return max(meta_of(node).block, 0)


def _round(graph: fx.Graph, copy: fx.Node, source: fx.Node, phase: str, block: int) -> fx.Node:
    """Give a copy of ``source`` its facts, and wait for it."""
    record = meta_of(source)
    facts = record.having(specs=record.specs, phase=phase, block=block, again=False, bundles=(), step=None, value=-1)
    set_meta(copy, facts)
    wait = write_call(graph, arrived, (copy, source))
    set_meta(wait, facts)
    return wait

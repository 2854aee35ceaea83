"""When the collectives of a lowered graph are waited for, and which of them nothing in the graph waits for.

A collective starts where its node stands. Code generation places the waits, and simulation counts on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.host_copies import arrived, comes_from_host
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes

aten = torch.ops.aten

_REDUCTIONS = (c.all_reduce, c.reduce_scatter)


def changes_runs(node: fx.Node) -> bool:
    """Whether a node splits a dim in other runs than before, as weights of several products in one want it."""
    return node.target is c.all_to_all and node.args[1] == node.args[3]


def _holds_much(node: fx.Node) -> bool:
    """Whether its input is as large as what is sent; a gather holds a shard, and an all-reduce works in its result."""
    return node.target is c.reduce_scatter or (node.target is c.all_to_all and not changes_runs(node))


def wait_points(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every collective, the node in front of which it is waited for: the first to use its result.

    One that holds a large input is waited for before the next of its kind starts at the latest, so that no more than
    two hold theirs. For those that are open it does not wait.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    following: dict[Any, fx.Node] = {}  # by kind, the collective that comes next
    points = {}
    for node in reversed(graph.nodes):
        if node.target not in c.COLLECTIVES or meta_of(node).open:
            continue
        until = [*node.users] or [node.next]
        if _holds_much(node) and node.target in following:
            until.append(following[node.target])
        points[node] = min(until, key=place.__getitem__)
        if not changes_runs(node):
            following[node.target] = node
    return points


def hoistable_gathers(graph: fx.Graph, exchanges: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """Gathers of what is there before the graph computes, each with the operators that lead to it, in order; but for
    those of slices, which stay, and of what waited on the host for backward. With ``exchanges``, what is brought into
    other runs, too.
    """
    kinds = (c.all_gather, c.all_to_all) if exchanges else (c.all_gather,)
    if not any(graph.find_nodes(op="call_function", target=kind, sort=False) for kind in kinds):
        return {}
    chains: dict[fx.Node, list[fx.Node]] = {}
    gathers = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            chains[node] = []
        sources = input_nodes(node)
        packs = node.target is aten.cat.default or comes_from_host(node)
        if node.op != "call_function" or not (len(sources) == 1 or packs) or any(n not in chains for n in sources):
            continue
        is_gather = node.target is c.all_gather or (exchanges and changes_runs(node))
        if meta_of(node).multi_output or (node.target in c.COLLECTIVES and not is_gather) or meta_of(node).stays:
            continue
        before = list(dict.fromkeys(link for source in sources for link in chains[source]))
        if is_gather:
            gathers[node] = before
        chains[node] = [*before, node]
    return gathers


def sinkable_reductions(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Reductions that only the graph's results wait for, each with the operators that follow from it, in order."""
    if not any(graph.find_nodes(op="call_function", target=target, sort=False) for target in _REDUCTIONS):
        return {}
    after: dict[fx.Node, list[fx.Node] | None] = {}
    for node in reversed(graph.nodes):
        after[node] = _what_follows(node, after)
    return {node: after[node] or [] for node in graph.nodes if node.target in _REDUCTIONS and after[node] is not None}


def _what_follows(node: fx.Node, after: dict[fx.Node, list[fx.Node] | None]) -> list[fx.Node] | None:
    """Operators that need ``node``, if they need nothing else that the graph computes; None where they do."""
    follows: dict[fx.Node, None] = {}
    for user in node.users:
        if user.op == "output":
            continue
        others = [source for source in input_nodes(user) if source is not node and user.target is not arrived]
        later = after[user]
        if later is None or any(source.op != "placeholder" for source in others):
            return None
        follows |= dict.fromkeys([user, *later])
    return sorted(follows)


def collectives_among(nodes: Sequence[fx.Node]) -> int:
    """How many of ``nodes`` communicate."""
    return sum(node.target in c.COLLECTIVES for node in nodes)

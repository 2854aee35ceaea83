"""Which values of a graph have memory of their own, and which are views of others."""

from __future__ import annotations

from torch import fx

from cost_models.ops import is_free
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` makes no memory of its own."""
    return not is_getitem(node) and not meta_of(node).multi_output and is_free(node.target)  # type: ignore[arg-type]


def storage_root(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares."""
    return through_views(node)[-1]


def through_views(node: fx.Node) -> list[fx.Node]:
    """A value, and what it is only another view of, the nearest first."""
    views = [node]
    while node.op == "call_function" and is_view(node) and input_nodes(node):
        node = input_nodes(node)[0]
        views.append(node)
    return views


def memory_root(node: fx.Node) -> fx.Node:
    """The value whose memory ``node`` is in: that of the whole for a slice of a split."""
    root = storage_root(node)
    while is_getitem(root) and is_free(root.args[0].target):  # type: ignore[union-attr,arg-type]
        root = storage_root(input_nodes(root.args[0])[0])  # type: ignore[arg-type]
    return root


def users_through_views(node: fx.Node) -> list[fx.Node]:
    """Users of a value and of its views."""
    users: list[fx.Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        users.append(user)
        if user.op == "call_function" and is_view(user):
            pending += list(user.users)
    return users

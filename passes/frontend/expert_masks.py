"""Masks that loops over experts pick rows by: that they are of one expert each, seen by their values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, write_call
from galvatron_fx.ir.kernels.experts import dispatch, group_of
from passes.frontend.capture.value_reads import remedy_for_picks
from passes.frontend.id_values import INTEGERS, Values, choices, values_of_constants, values_of_ids

__all__ = ["ProveMasks", "refuse_shared_rows"]

aten = torch.ops.aten

_MANY = 16  # times as many ids as experts are drawn where ids may be of anything


@dataclass(frozen=True)
class ProveMasks:
    """See that the masks of a loop over experts pick no row twice, and that experts it passes over have none: by their
    values for a few draws of the ids that they follow from.

    Rewrite: ``ids, valid = group_of(stack([chosen == 0, chosen == 1, ...]))`` -> ``ids = chosen.reshape(-1)``. Masks
    that leave rows out stay. Raises CaptureError where they do not follow from ids alone, or a row is picked twice.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        nodes = [node for node in graph.graph.nodes if node.target is group_of]
        for node in nodes:
            _prove(graph, node)
        if nodes:
            eliminate_dead_code(graph)
            graph.recompile()
        return graph


def refuse_shared_rows(graph: fx.GraphModule) -> None:
    """Raise CaptureError where masks of a loop may pick a row twice; ``graph``: a trace, which stays as it is."""
    for node in graph.graph.nodes:
        if node.target is group_of:
            _proof(graph, node)


def _proof(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, list[Values]]:
    """Ids that the masks follow from, None where they are constants, and values by which they are apart."""
    roots: list[fx.Node | None] = [*_roots(graph, node)] or [None]
    tried_roots = ((root, _tried(node, root)) for root in roots)
    proofs = ((root, tried) for root, tried in tried_roots if all(_are_apart(node, values) for values in tried))
    root, tried = next(proofs, (None, []))
    if not tried:
        raise CaptureError(
            f"rows are picked by masks that do not give each to one expert, so there is no one graph of it:\n"
            f"  {node.args[3]}\n{remedy_for_picks()}"
        )
    return root, tried


def _prove(graph: fx.GraphModule, node: fx.Node) -> None:
    root, tried = _proof(graph, node)
    draws = [draw for values in tried for draw in zip(values[node], values.get(root, ()), strict=False)]  # type: ignore[arg-type]
    if not draws or not all(valid.all() and torch.equal(ids, chosen.reshape(-1)) for (ids, valid), chosen in draws):
        return
    for user in list(node.users):
        if is_getitem(user) and user.args[1] == 0:
            with graph.graph.inserting_after(node):
                flat = write_call(graph.graph, aten.reshape.default, (root, list(meta_of(user).spec.shape)))
            flat.meta.update(user.meta)
            user.replace_all_uses_with(flat)
        elif is_getitem(user):
            _keep_all(user)


def _values(root: fx.Node, count: int, stray: int | None = None) -> Values:
    """Of what follows from ids below ``count``, and ``stray``; nothing where that fails."""
    try:
        return values_of_ids(root, count, stray)
    except (IndexError, RuntimeError):
        return {}


def _tried(node: fx.Node, root: fx.Node | None) -> list[Values]:
    """What masks are for ids of ``root`` at random, also of none of the experts; without a root, what they are."""
    if root is None:
        return [values_of_constants(node)]
    count, known = meta_of(node.args[0]).spec.shape[0], choices(root)  # type: ignore[arg-type]
    tried = [_values(root, known or count)]
    if known is None:  # ids of anything, so that some may be of no expert
        tried += filter(None, (_values(root, *ids) for ids in ((_MANY * count,), (count, -1), (count, count))))
    return tried


def _roots(graph: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The ids that masks follow from, each of them alone: the first as they were made, then what was made of them."""
    inputs = {placeholder for _, placeholder in ports(graph)}
    place = {each: at for at, each in enumerate(graph.graph.nodes)}
    roots: list[fx.Node] = []
    pending = {source for source in input_nodes(node) if not _is_constant(source, inputs)}
    while pending:
        last = max(pending, key=place.__getitem__)
        if len(pending) == 1 and not meta_of(last).multi_output and meta_of(last).spec.dtype in INTEGERS:
            roots.append(last)
        if last in inputs or is_getitem(last) or choices(last) is not None:
            break
        pending.remove(last)
        pending |= {source for source in input_nodes(last) if not _is_constant(source, inputs)}
    return roots[::-1]


def _is_constant(node: fx.Node, inputs: set[fx.Node]) -> bool:
    """Whether a node follows from nothing but constants."""
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        if one in inputs or torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()):
            return False
        more = [source for source in input_nodes(one) if source not in seen]
        pending, seen = [*pending, *more], seen.union(more)
    return True


def _are_apart(node: fx.Node, values: Values) -> bool:
    """Whether no row is picked twice, and none by an expert that the loop passes over."""
    masks, hit, never = node.args[:3]
    if node not in values:
        return False
    if any(int(value.sum(0).max()) > 1 for value in values[masks]):  # type: ignore[index]
        return False
    if never is not None and any(bool(value.any()) for value in values[never]):  # type: ignore[index]
        return False
    pairs = zip(values[hit], values[masks], strict=True) if hit is not None else ()  # type: ignore[index]
    return all(bool((seen | ~value.any(1)).all()) for seen, value in pairs)


def _keep_all(valid: fx.Node) -> None:
    """Take out what leaves rows out."""
    pending = list(valid.users)
    while pending:
        user = pending.pop()
        if user.target is aten.where.self:
            user.replace_all_uses_with(user.args[1])  # type: ignore[arg-type]
        elif user.target is dispatch or user.target in (aten.reshape.default, aten.view.default, aten.expand.default):
            pending += list(user.users)

"""Ranges in the traces of torch.profiler: what each layer block and each collective of a graph takes, by name."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.torch_compat.graphs import enter_range, exit_range, is_profiled
from passes.lowering.codegen import communicates

__all__ = ["when_profiled", "with_ranges"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def when_profiled(plain: Boxed, named: Callable[[], Boxed]) -> Boxed:
    """``plain``, and while a profiler runs what ``named`` makes, once: no cost but that of asking."""
    named_once = cache(named)

    def run(arguments: list[Any]) -> Sequence[Any]:
        return named_once()(arguments) if is_profiled() else plain(arguments)

    return run


def with_ranges(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a bound graph with a range around what each block does in one go, "block 3 (model.layers.2), forward",
    and one around the start of each collective and the wait for it, of the node's name.

    Rewrite: ``y = mm(x, w)`` -> ``r = enter_range("block 3, forward"); y = mm(x, w); exit_range(r)``.
    """
    named = copied(graph)
    modules = _modules(named)
    ends = named.graph.output_node()
    block: tuple[int, str] | None = None
    opened: fx.Node | None = None
    for node in [node for node in named.graph.nodes if node.op == "call_function"]:
        at = (max(meta_of(node).block, 0), meta_of(node).phase) if has_meta(node) else block
        if at is not None and at != block:
            with named.graph.inserting_before(node):
                _close(named.graph, opened)
                opened = named.graph.call_function(enter_range, (_title(*at, modules),))
            block = at
        if communicates(node):
            with named.graph.inserting_before(node):
                inner = named.graph.call_function(enter_range, (node.name,))
            with named.graph.inserting_after(node):
                _close(named.graph, inner)
    with named.graph.inserting_before(ends):
        _close(named.graph, opened)
    return named


def _close(graph: fx.Graph, opened: fx.Node | None) -> None:
    if opened is not None:
        graph.call_function(exit_range, (opened,))


def _title(block: int, phase: str, modules: dict[int, str]) -> str:
    where = f" ({modules[block]})" if modules.get(block) else ""
    return f"block {block}{where}, {phase}"


def _modules(graph: fx.GraphModule) -> dict[int, str]:
    """The module that all operators of a block are in."""
    paths: dict[int, set[str]] = defaultdict(set)
    for node in graph.graph.nodes:
        if node.op == "call_function" and has_meta(node) and meta_of(node).module:
            paths[max(meta_of(node).block, 0)].add(meta_of(node).module.replace(".", os.sep))
    return {block: os.path.commonpath(modules).replace(os.sep, ".") for block, modules in paths.items()}

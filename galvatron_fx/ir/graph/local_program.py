"""Programs of several nodes that stand for one operator or collective, and what each of their nodes has to be.

A lookup in a split vocabulary, a bundle of collectives, a collective that is bound to a process group: what passes
between their nodes differs from rank to rank and is part of no whole tensor, so no rule of a single operator can say
whether they are right. Who writes such a program therefore records what it wrote, and the verifier compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import Placements, Step, has_meta, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import Inside

TENSOR = "tensor"  # stands for a tensor among literals


def literals(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``node`` with :data:`TENSOR` for tensors, as tuples."""
    if not node.kwargs:
        return tuple(map(_frozen, node.args))
    return (tuple(map(_frozen, node.args)), *((name, _frozen(node.kwargs[name])) for name in sorted(node.kwargs)))


def _frozen(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    return TENSOR if isinstance(value, fx.Node) else value


def placements_of(node: fx.Node, columns: int | None = None) -> Placements:
    """The placements of every output of ``node`` on the first ``columns`` (all by default)."""
    if not has_meta(node):
        return ()
    placements = meta_of(node).placements
    return placements if columns is None else tuple(placed[:columns] for placed in placements)


def record_program(program: str, nodes: Sequence[fx.Node], results: Mapping[fx.Node, Placements], columns: int) -> None:
    """Record ``nodes``, in order, as the steps of a program; ``results``: the placements of what leaves it."""
    for index, node in enumerate(nodes):
        record = meta_of(node)
        if node in results:
            placements = results[node]
        else:
            outputs = range(len(record.specs))
            placements = tuple((Inside(program, index, output),) * columns for output in outputs)
        set_meta(node, record.having(placements=placements))
    for node in nodes:
        record_step(node, program, columns)


def record_step(node: fx.Node, program: str, columns: int) -> None:
    """Record what ``node`` is now as what it has to be."""
    inputs = tuple(placements_of(source, columns) for source in input_nodes(node))
    set_meta(node, meta_of(node).having(step=Step(program, columns, node.target, literals(node), inputs)))


def renewed(step: Step, node: fx.Node) -> Step:
    """``step`` for ``node`` as it is called now: its sizes have become local, or a kernel has taken its place."""
    return Step(step.program, step.columns, node.target, literals(node), step.inputs)

"""A lowered program whose prices count on the loads of experts that steps had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from torch import fx

from cost_models.ops import is_matmul
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.metadata import has_meta, meta_of, set_meta
from galvatron_fx.runtime.expert_loads import ExpertLoads, LayerLoads
from passes.lowering.lower_step import Lowered

__all__ = ["as_measured"]


def as_measured(lowered: Lowered, steps: Sequence[ExpertLoads], ranks: int, rows: float) -> Lowered:
    """Price a program as its layers of experts were loaded in ``steps``: in the mean over these, the rows of the
    busiest of ``ranks``, in as many further rounds. ``rows``: of a rank, if all have the same.
    """
    graphs = lowered.halves.forward, lowered.halves.backward
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function" and has_meta(node)]
    blocks = sorted({meta_of(node).block for node in nodes if isinstance(node.target, FurtherRounds)})
    layers = list(zip(*(step.layers for step in steps), strict=True))
    loads = dict(zip(blocks, layers, strict=True)) if blocks else {}
    for node in nodes:
        if meta_of(node).block in loads:
            _load(node, loads[meta_of(node).block], ranks, rows)
    return lowered


def _load(node: fx.Node, steps: Sequence[LayerLoads], ranks: int, rows: float) -> None:
    rounds = int(mean(layer.further_rounds for layer in steps) + 0.5)
    busiest = mean(layer.imbalance(ranks) for layer in steps) * rows / (1 + rounds)
    if isinstance(node.target, FurtherRounds):
        node.target = replace(node.target, expected=rounds)
        for inner in node.target.body.graph.nodes:
            _fill(inner, busiest)
    _fill(node, busiest)


def _fill(node: fx.Node, busiest: float) -> None:
    """Have a product whose rows may be of no token done for ``busiest`` of them."""
    if node.op == "call_function" and is_matmul(node.target) and has_meta(node) and meta_of(node).filled < 1:
        room = meta_of(node.args[0]).spec.shape[0]  # type: ignore[arg-type]
        set_meta(node, meta_of(node).having(filled=min(1.0, busiest / room)))

"""Decide one mesh axis: a sharding rule for every operator, block by block, each distinct block once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.graph.placement import REPLICATE, Partial, Placement, shown_as
from galvatron_fx.ir.plan.strategy import cache_key
from passes.sharding.axis_decisions import AxisDecisions
from passes.sharding.block_ilp import BlockProblem, Decision
from passes.sharding.graph_values import GraphValues
from passes.sharding.insert_collectives import AxisSharding
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules

SolvedBlocks = dict[Any, tuple[Decision, ...]]
"""Decisions of blocks that were solved, by what they rest on beside prices (:mod:`passes.sharding.block_ilp`)."""


@dataclass(frozen=True)
class AssignShardings:
    """Choose the rules of one mesh axis for a whole graph.

    ``axis``: its index in the lowering; ``roles``: what the axis does in each block; ``prices``: times of operators and
    redistributions; ``fixed``: parameters, by name, whose placement is decided already. Blocks that are equal, and
    enter and leave equally, are solved once (``cache``). ``only``: just these blocks (for prices; such a decision
    cannot be lowered). ``outputs_as_terms``: outputs of the model may leave as terms of a sum. ``narrow_terms``: terms
    may be added up in a narrower dtype than the parameters have, which rounds otherwise than one device does.
    """

    axis: int
    roles: Sequence[RoleRules]
    prices: Prices
    cache: SolvedBlocks = field(default_factory=dict)
    fixed: Mapping[str, Placement] = field(default_factory=dict)
    only: frozenset[int] | None = None
    outputs_as_terms: bool = False
    narrow_terms: bool = False

    def run(self, graph: fx.GraphModule) -> AxisSharding:
        """Return the decision for ``graph``, whose shapes are those left by the axes lowered before."""
        return self.decide(GraphValues(graph))

    def decide(self, values: GraphValues) -> AxisSharding:
        """The same for a graph whose values are known."""
        decided = AxisDecisions(values, self.roles, self.prices, self.outputs_as_terms, self.narrow_terms)
        self._place_inputs(decided)
        for index, nodes in sorted(values.blocks.items()):
            if self.only is None or index in self.only:
                BlockProblem(decided, index, nodes).decide(self.cache)
        placements = () if self.only is not None else tuple(_output(decided, *output) for output in values.outputs)
        return AxisSharding(
            axis=self.axis,
            degree=decided.degree,
            rules=decided.rules,
            inputs=decided.inputs,
            outputs=placements,
            boundaries=decided.exits,
        )

    def _place_inputs(self, decided: AxisDecisions) -> None:
        """Place what no block decides: inputs, constants, and parameters and caches that are fixed or of no block."""
        values = decided.values
        for port, node in ports(values.graph):
            if port.kind == "cache" and cache_key(port.name) in self.fixed:
                decided.inputs[node] = self.fixed[cache_key(port.name)]
            elif node in values.cache_owner:
                continue
            elif port.kind == "param" and port.name in self.fixed and not decided.leaves_terms(node):
                decided.inputs[node] = self.fixed[port.name]
            elif port.kind != "param" or node not in values.owner:
                decided.inputs[node] = REPLICATE
        for node in values.constants:
            decided.inputs[node] = REPLICATE


def _output(decided: AxisDecisions, port: Any, node: fx.Node | None) -> Placement | None:
    if node is None:
        return None
    if port.is_input_gradient and decided.outputs_as_terms:
        return _of_each(decided, node)
    if port.kind == "grad":
        parameter = decided.values.parameter_of(port)
        if parameter is not None and decided.leaves_terms(parameter) and isinstance(decided.produced(node), Partial):
            return decided.produced(node)
        return decided.inputs[parameter] if parameter is not None else REPLICATE
    if port.kind == "cache":
        cache = decided.values.cache_of(port)
        return _kept(decided, node) if cache is None else decided.inputs[cache]
    if port.kind == "output" and decided.outputs_as_terms and isinstance(decided.produced(node), Partial):
        return decided.produced(node)
    if port.kind == "output" and decided.values.outputs_stay:
        return shown_as(decided.exits.get(node, decided.produced(node)))
    return REPLICATE


def _of_each(decided: AxisDecisions, node: fx.Node) -> Placement:
    """What each part of the batch gives: a term of a sum, its own rows, or the whole."""
    produced = decided.produced(node)
    return produced if isinstance(produced, Partial) else shown_as(decided.exits.get(node, produced))


def _kept(decided: AxisDecisions, node: fx.Node) -> Placement:
    """How a cache that forward makes is kept: as it lies, where the role of its block lets it lie so."""
    record = meta_of(node)
    placement = decided.exits.get(node, decided.produced(node))
    return placement if placement in decided.role(record.block).cache_choices(record.spec) else REPLICATE

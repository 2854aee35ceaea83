"""What is decided so far while one mesh axis is assigned: placements of inputs, rules of operators, exits of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Placement, Shard
from passes.sharding.graph_values import GraphValues
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules
from passes.sharding.rules import OpRule


class AxisDecisions:
    """The graph seen from one mesh axis, and the decisions that blocks add one after the other.

    ``values``: what is known of the graph's values without any decision; ``inputs``: placements of placeholders and
    constants; ``rules``: of operators; ``exits``: placements in which values cross between blocks. ``roles``: what the
    axis does in each block; ``outputs_as_terms``: outputs of the model may leave as terms of a sum;
    ``narrow_terms``: terms may be added up in a narrower dtype than the parameters have.
    """

    def __init__(
        self,
        values: GraphValues,
        roles: Sequence[RoleRules],
        prices: Prices,
        outputs_as_terms: bool,
        narrow_terms: bool = False,
    ) -> None:
        self.values = values
        self.roles = roles
        self.prices = prices
        self.degree = prices.degree
        self.outputs_as_terms = outputs_as_terms
        self.narrow_terms = narrow_terms
        self.inputs: dict[fx.Node, Placement] = {}
        self.rules: dict[fx.Node, OpRule] = {}
        self.exits: dict[fx.Node, Placement] = {}
        self._sums = values.sums if outputs_as_terms else set()
        self._splitting: dict[int, bool] = {}

    def role(self, block: int) -> RoleRules:
        """What the axis does in a block."""
        return self.roles[max(block, 0)]

    def produced(self, node: fx.Node) -> Placement:
        """How a value lies where it is made."""
        if node in self.inputs:
            return self.inputs[node]
        if is_getitem(node):
            source, position = node.args
            return self.rules[source].outputs[position]  # type: ignore[index]
        return self.rules[node].outputs[0]

    def exit_placement(self, node: fx.Node) -> Placement:
        """How a value made in a block crosses to other blocks: by its maker's role, as the parameter it is a gradient
        of, or as a term of that gradient, which is reduced once for all blocks that use the parameter.
        """
        if node not in self.exits:
            record = meta_of(node)
            parameter = self.values.gradient_of.get(node)
            if node in self._sums or self._reduced_later(node):
                self.exits[node] = PARTIAL
            elif parameter is not None and parameter in self.inputs:
                self.exits[node] = self.inputs[parameter]
            else:
                self.exits[node] = self.role(record.block).boundary(record.spec)
        return self.exits[node]

    def _reduced_later(self, node: fx.Node) -> bool:
        """Whether each rank makes a term of what a block adds to the gradient of a parameter that is whole."""
        parameters = self.values.crossing_terms.get(node, frozenset())
        block = max(meta_of(node).block, 0)
        makes_terms = bool(parameters) and self.role(block).sums_gradients() and self._splits(block)
        return makes_terms and node in self.values.sums and all(map(self._lies_whole, parameters))

    def _splits(self, block: int) -> bool:
        """Whether the axis splits what crosses the borders of a block: the batch divides, say."""
        if block not in self._splitting:
            specs = (spec for node in self.values.blocks[block] for spec in meta_of(node).specs if spec is not None)
            self._splitting[block] = any(isinstance(self.role(block).boundary(spec), Shard) for spec in specs)
        return self._splitting[block]

    def _lies_whole(self, parameter: fx.Node) -> bool:
        if parameter in self.inputs:
            return self.inputs[parameter] == REPLICATE
        owner = self.role(self.values.owner[parameter])
        return self.parameter_choices(owner, parameter) == [REPLICATE]

    def parameter_choices(self, role: RoleRules, parameter: fx.Node) -> list[Placement]:
        """Where a parameter may lie in a block of ``role``."""
        return role.parameter_choices(meta_of(parameter).spec, parameter in self.values.listed)

    def leaves_terms(self, parameter: fx.Node) -> bool:
        """Whether the gradient of ``parameter`` may leave the graph as terms: its owner's role reduces it later."""
        return parameter in self.values.owner and self.role(self.values.owner[parameter]).leaves_terms()

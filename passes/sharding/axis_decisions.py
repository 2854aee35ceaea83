"""What is decided so far while one mesh axis is assigned: placements of inputs, rules of operators, exits of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from galvatron_fx.ir.annotations import facts, output_ports, ports, signature
from galvatron_fx.ir.op_call import is_getitem
from galvatron_fx.ir.placement import PARTIAL, Placement
from galvatron_fx.ir.precision import computed_in, policy_of
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules
from passes.sharding.rules import OpRule
from passes.sharding.value_origins import (
    before_cast,
    gradient_parameters,
    original_parameters,
    parameter_owners,
    sums_over_batch,
)


class AxisDecisions:
    """The graph seen from one mesh axis, and the decisions that blocks add one after the other.

    ``inputs``: placements of placeholders and constants; ``rules``: of operators; ``exits``: placements in which values
    cross between blocks. ``roles``: what the axis does in each block; ``outputs_as_terms``: outputs of the model may
    leave as terms of a sum. ``unreduced``: values whose terms are to be added up further on.
    """

    def __init__(
        self, graph: fx.GraphModule, roles: Sequence[RoleRules], prices: Prices, outputs_as_terms: bool
    ) -> None:
        self.roles = roles
        self.prices = prices
        self.degree = prices.degree
        self.outputs_as_terms = outputs_as_terms
        self.inputs: dict[fx.Node, Placement] = {}
        self.rules: dict[fx.Node, OpRule] = {}
        self.exits: dict[fx.Node, Placement] = {}
        self.gradient_of = gradient_parameters(graph)
        self.owner = parameter_owners(graph)
        self.outputs: list[tuple[Any, fx.Node | None]] = output_ports(graph)
        self.parameters = {node for port, node in ports(graph) if port.kind == "param"}
        self.originals = original_parameters(graph)
        # Without a loss of its own, the model's caller computes one from whole outputs.
        self.outputs_stay = signature(graph).loss is not None
        policy = policy_of(graph)
        dtypes = [computed_in(policy, facts(node).spec.dtype) for node in self.parameters]
        self.parameter_itemsize = max((d.itemsize for d in dtypes if d.is_floating_point), default=0)
        self.unreduced = before_cast(graph)
        self._sums = sums_over_batch(graph) if outputs_as_terms else set()

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
        """How a value made in a block crosses to other blocks: by its maker's role, or as the parameter it is a
        gradient of.
        """
        if node not in self.exits:
            record = facts(node)
            parameter = self.gradient_of.get(node)
            if node in self._sums:
                self.exits[node] = PARTIAL
            elif parameter is not None and parameter in self.inputs:
                self.exits[node] = self.inputs[parameter]
            else:
                self.exits[node] = self.role(record.block).boundary(record.spec)
        return self.exits[node]

    def leaves_terms(self, parameter: fx.Node) -> bool:
        """Whether the gradient of ``parameter`` may leave the graph as terms: its owner's role reduces it later."""
        return parameter in self.owner and self.role(self.owner[parameter]).leaves_terms()

"""What a rule costs is what its operator costs with the tensors of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.node_cost import call_formula
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall, op_call
from galvatron_fx.ir.graph.placement import Exchanged, Placement, Shard
from galvatron_fx.ir.plan.strategy import CAPACITY
from passes.sharding.prices import Prices
from passes.sharding.rules import OpRule, op_rules
from tests.helpers import DEVICE
from tests.passes.sharding.rule_calls import Call, aten, embeddings, experts, losses, real, whole
from tests.passes.sharding.test_rules import name, one_operator

DEGREE = 2
# Seconds are bytes here, and computing takes none.
BYTES = replace(
    DEVICE,
    memory_bandwidth_bytes_per_s=1.0,
    memory_efficiency=1.0,
    launch_overhead_s=0.0,
    peak_flops=tuple((dtype, 1e30) for dtype, _ in DEVICE.peak_flops),
)
CALLS: list[Call] = [
    *embeddings(-1, False),
    *losses(0, -100),
    *experts(),
    (aten.gather.default, (real(8, 8), 1, whole(8, 8, 4)), {}),
    (aten.index_select.default, (real(8, 8), 0, whole(8, 8)), {}),
    (aten.zeros_like.default, (real(8, 8),), {}),
    (aten.mm.default, (real(8, 16), real(16, 4)), {}),
    (aten.add.Tensor, (real(8, 8), real(8)), {}),
]


def on_a_rank(spec: TensorSpec | None, placement: Placement) -> TensorSpec | None:
    if spec is None or not isinstance(placement, (Shard, Exchanged)):
        return spec
    share = 1 / DEGREE if isinstance(placement, Shard) else CAPACITY / DEGREE
    sizes = enumerate(spec.shape)
    return TensorSpec(tuple(int(size * share) if dim == placement.dim else size for dim, size in sizes), spec.dtype)


def cost_on_a_rank(call: OpCall, rule: OpRule) -> OpCost:
    inputs = tuple(map(on_a_rank, call.inputs, rule.inputs))
    outputs = tuple(map(on_a_rank, call.outputs, rule.outputs))
    return call_formula(replace(call, inputs=inputs, outputs=outputs))


@pytest.mark.parametrize("call", CALLS, ids=name)
def test_a_rule_moves_the_bytes_of_its_operator_on_a_rank(call: Call) -> None:
    described = op_call(one_operator(call)[1])
    rules = [rule for rule in op_rules(described, DEGREE) if not rule.expansion]
    prices = Prices(BYTES, (Axis("a", DEGREE, 1e-6, 3e11),))
    for rule in rules:
        cost = cost_on_a_rank(described, rule)
        moved = cost.read_bytes + cost.written_bytes
        seconds = prices.operator_s(described, call_formula(described), rule)
        assert seconds == pytest.approx(moved, rel=2e-3), rule  # a little more, so that less memory is preferred
    assert len(rules) > 1

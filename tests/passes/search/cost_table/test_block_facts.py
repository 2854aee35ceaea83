"""What is read off a block, before any decision and with none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_models.node_cost import node_cost
from passes.search.cost_table.block_facts import BlockFacts, PriceClasses
from passes.search.cost_table.block_terms import TermsReader
from passes.search.cost_table.graph_index import GraphIndex
from tests.helpers import DEVICE, captured
from tests.models import zoo
from tests.passes.sharding.test_shard_parameters import two_uses
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)


@pytest.mark.parametrize("second", [1, 2])
def test_a_parameter_that_another_block_uses_too(second: int) -> None:
    """Blocks side by side take one gather; blocks further apart may lie in stages that reduce gradients apart."""
    facts = [BlockFacts(GraphIndex.of(two_uses(second)), block) for block in (0, second)]
    assert not facts[0].far_terms
    assert [str(term) for term in facts[1].far_terms] == (["mm_3"] if second == 2 else [])
    assert {node.name for node in facts[0].gathered} == {"w", "bias"}
    assert {node.name for node in facts[1].gathered} == ({"w"} if second == 2 else set())


def test_operators_that_nothing_splits_cost_what_their_records_say() -> None:
    """With embeddings and losses, which do not read all that they are given."""
    graph = captured(*zoo.gpt2())
    index = GraphIndex.of(graph)
    for block in index.blocks:
        facts = BlockFacts(index, block)
        operators = TermsReader(facts, ()).terms.operators
        costs = [node_cost(call.node, index.sizes) for call in facts.calls]
        assert operators.flops.size.tolist() == [cost.flops for cost in costs]
        moved = np.add.reduceat(operators.tensors.size, operators.starts)
        assert moved.tolist() == [cost.read_bytes + cost.written_bytes for cost in costs]


def test_operators_take_what_was_measured_of_them() -> None:
    """Times its share, the curve of a call is what was measured; else, and where others were, it is as ever."""
    facts = BlockFacts(GraphIndex.of(captured(*zoo.gpt2())), 1)
    operators = [call for call in facts.calls if call.curve_s(DEVICE) > 0]
    curves = np.array([call.curve_s(DEVICE) for call in operators])
    calls = {call.key: times * call.curve_s(DEVICE) for call, times in zip(operators, (0.5, 3.0), strict=False)}
    measured = replace(DEVICE, calls=calls)
    expected = np.array([calls.get(call.key, call.curve_s(DEVICE)) for call in operators])
    assert PriceClasses.of(operators, measured).measured_shares * curves == pytest.approx(expected, rel=1e-12)
    assert [call.whole_s(measured) for call in operators] == expected.tolist() != curves.tolist()
    elsewhere = replace(DEVICE, calls={"aten.mm.default|float16[3,3],float16[3,3]": 1.0})
    for unmeasured in (DEVICE, elsewhere):
        assert PriceClasses.of(facts.calls, unmeasured).measured_shares.tolist() == [1.0] * len(facts.calls)
    assert PriceClasses.of([], measured).measured_shares.tolist() == []

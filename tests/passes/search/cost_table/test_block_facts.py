"""What is read off a block, before any decision and with none."""

from __future__ import annotations

import numpy as np
import pytest

from cost_models.node_cost import node_cost
from passes.search.cost_table.block_facts import BlockFacts
from passes.search.cost_table.block_terms import TermsReader
from passes.search.cost_table.graph_index import GraphIndex
from tests.helpers import captured
from tests.models import zoo
from tests.passes.sharding.test_shard_parameters import two_uses


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

"""What is read off a block before any decision."""

from __future__ import annotations

import pytest

from passes.search.cost_table.block_facts import BlockFacts
from passes.search.cost_table.graph_index import GraphIndex
from tests.passes.sharding.test_shard_parameters import two_uses


@pytest.mark.parametrize("second", [1, 2])
def test_a_parameter_that_another_block_uses_too(second: int) -> None:
    """Blocks side by side take one gather; blocks further apart may lie in stages that reduce gradients apart."""
    facts = [BlockFacts(GraphIndex.of(two_uses(second)), block) for block in (0, second)]
    assert not facts[0].far_terms
    assert [str(term) for term in facts[1].far_terms] == (["mm_3"] if second == 2 else [])
    assert {node.name for node in facts[0].gathered} == {"w", "bias"}
    assert {node.name for node in facts[1].gathered} == ({"w"} if second == 2 else set())

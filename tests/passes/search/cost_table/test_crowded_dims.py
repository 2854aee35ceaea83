"""Dims that several roles split: not all ranks may find enough of them, and estimates say so."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import Strategy
from passes.search.cost_table.amounts import Amount, Amounts
from passes.search.cost_table.cost_table import CostTableRequest, Pricer
from passes.simulation.choice import SimulateChoice
from tests.helpers import captured
from tests.models import zoo


@pytest.mark.parametrize("degrees, expected", [
    ((2, 4), 1 / 8), ((2, 8), 1 / 2), ((8, 1), 1 / 8), ((8, 2), 1 / 8), ((3, 2), 1 / 2), ((16, 4), 1 / 4),
])  # fmt: skip
def test_a_role_splits_what_those_before_it_leave(degrees: tuple[int, int], expected: float) -> None:
    """A dim of eight."""
    amounts = Amounts.of([Amount(1.0, False, (1, 1), ((8, (0, 1)),)), Amount(1.0, False, (1, 1))], 2)
    one = np.ones(1)
    crowded, roomy = amounts.on_rank(np.array([degrees], dtype=np.float64), one, one)[:, 0]
    assert crowded == pytest.approx(expected)
    assert roomy == pytest.approx(1 / (degrees[0] * degrees[1]))


@cache
def long_llama() -> fx.GraphModule:
    model, inputs = zoo.llama(layers=1)
    return captured(model, {name: ids.repeat(1, 2048) for name, ids in inputs.items()})


def estimated_and_simulated(graph: fx.GraphModule, cluster: Cluster, roles: tuple[str, ...]) -> tuple[float, float]:
    strategy, pricer = Strategy(roles), Pricer(graph, cluster, {})
    kinds = tuple(tuple(i for i, r in enumerate(roles) if r == role) for role in dict.fromkeys(roles))
    (table,) = pricer.cost_tables([CostTableRequest((strategy,), 1, kinds)])
    assert not isinstance(table, Exception)
    blocks = pricer.block_fingerprints
    report = SimulateChoice(graph, cluster, blocks).run([strategy] * len(blocks), (0,), None)
    return float((table.forward + table.backward + table.once).sum()), report.step_time_s


@pytest.mark.sampled(3)
@pytest.mark.parametrize("roles", [
    ("sequence", "sequence", "tensor_sequence"), ("context", "sequence", "sequence"),
    ("context", "context", "sequence"),
])  # fmt: skip
def test_estimates_of_few_heads_agree_with_simulations(roles: tuple[str, ...]) -> None:
    """Four heads, two of keys, among eight or four ranks: some compute the same, or send what others have as well."""
    estimated, simulated = estimated_and_simulated(long_llama(), Cluster.preset("8xA100-80GB"), roles)
    assert estimated == pytest.approx(simulated, rel=0.1)


def test_amounts_are_what_their_parts_are():
    """Also where the same dims are crowded in several of them."""
    crowded = Amount(2.0, True, (1, 2), ((6, (0, 1)),))
    parts = [Amounts.of([Amount(1.0, False, (1, 0)), crowded], 2), Amounts.of([], 2), Amounts.of([crowded] * 2, 2)]
    degrees, ones = np.array([[2.0, 2.0], [4.0, 3.0]]), np.ones(2)
    alone = np.concatenate([part.on_rank(degrees, 2 * ones, 2 * ones) for part in parts])
    assert (Amounts.joined(parts).on_rank(degrees, 2 * ones, 2 * ones) == alone).all()

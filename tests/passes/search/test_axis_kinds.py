"""Every way to tell axes apart is searched on small meshes, and collectives over these are priced one by one."""

from __future__ import annotations

import numpy as np
import pytest

from cost_models.collectives import collective_s
from galvatron_fx.errors import ClusterError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Skew
from galvatron_fx.ir.plan.strategy import Strategy
from passes.search.candidates import axis_partitions, candidates, fits_partition
from passes.search.cost_table.cost_table import CostTable, CostTableRequest, Pricer, cost_table_requests
from tests.passes.search.small_models import captured
from tests.report.explained_models import Stack, inputs

CLUSTER = Cluster.preset("4xTITAN-RTX-24GB")
JOINED, APART = ((0, 1),), ((0,), (1,))


def test_all_ways_to_tell_axes_apart() -> None:
    """As many as there are partitions of a set: 1, 2, 5; axes of one rank and of stages are left out."""
    assert axis_partitions((2, 2), 0) == [JOINED, APART]
    assert [len(axis_partitions((2,) * count, 0)) for count in (1, 2, 3)] == [1, 2, 5]
    assert axis_partitions((2, 1, 3), 0) == [((0, 2),), ((0,), (2,))]
    assert axis_partitions((2, 2, 2), 1) == [((1, 2),), ((1,), (2,))]
    assert axis_partitions((2, 2, 2, 2), 0) == [()]


def test_a_request_has_the_strategies_that_tell_no_more_apart() -> None:
    every = candidates(CLUSTER, ("data", "tensor"), False)
    joined, apart = cost_table_requests(every, 1, axis_partitions(CLUSTER.shape, 0))
    assert (joined.kinds, apart.kinds) == (JOINED, APART)
    assert {s.roles for s in joined.strategies} == {("data", "data"), ("tensor", "tensor")}
    assert apart.strategies == every and not fits_partition(Strategy(("data", "tensor")), JOINED)
    only = cost_table_requests(candidates(CLUSTER, ("data",), False), 1, axis_partitions(CLUSTER.shape, 0))
    assert [request.kinds for request in only] == [JOINED], "what no block tells apart is not searched twice"


def test_axes_told_apart_are_priced_one_after_the_other() -> None:
    pricer = Pricer(captured(Stack(layers=2, width=256), inputs(256)), CLUSTER, {})
    requests = [CostTableRequest((Strategy(("data", "data")),), 4, kinds) for kinds in ((), JOINED, APART)]
    merged, joined, apart = (costs for costs in pricer.cost_tables(requests) if isinstance(costs, CostTable))
    assert np.array_equal(merged.once, joined.once) and np.array_equal(merged.static, apart.static)
    latency_s = CLUSTER.axes[0].latency_s
    size = 2.0**20
    both = collective_s("all_reduce", size, CLUSTER.axes)
    each = sum(collective_s("all_reduce", size, [axis]) for axis in CLUSTER.axes)
    assert each > both + latency_s / 2
    assert (apart.once > joined.once).any() and (apart.once >= joined.once).all()


def test_no_skew_below_zero() -> None:
    with pytest.raises(ClusterError, match="late_s of the skew"):
        Skew(-1.0)
    for growth in (0.0, 1.1):
        with pytest.raises(ClusterError, match="growth of the skew"):
            Skew(1.0, growth)

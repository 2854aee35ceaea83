"""Parameters know whether their optimizer states live on the host: by the block of their first use, copies as well."""

from __future__ import annotations

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.prediction import STATE_COPIES, STATES, Cause
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.analysis.dataflow import owning_blocks
from passes.lowering.lower_stages import LowerStages
from passes.simulation.stages import SimulateStages
from tests.helpers import captured
from tests.models.zoo import gpt2

CLUSTER = Cluster.preset("2xA100-80GB")


def test_copies_of_tied_weights_are_marked_as_the_parameter_is() -> None:
    """GPT-2 ties its embedding to its head, which is in the other stage; predictions have the states where they are."""
    graph = captured(*gpt2(2))
    last = num_blocks(graph) - 1
    simulate = SimulateStages(CLUSTER, make_schedule("1f1b", 2, 2, 2), CLUSTER.axes)
    reports, marked = [], []
    for on_host in (True, False):
        strategies = [Strategy(("pipeline",), offload_states=on_host and i == 0) for i in range(last + 1)]
        lowered = LowerStages(strategies, [0, last], 2, CLUSTER).run(graph)
        marked.append({port.name for port in signature(lowered.joint).inputs if port.states_on_host})
        reports.append(simulate.run(lowered))
    first = {name for name, block in owning_blocks(graph).items() if block == 0}
    assert marked == [first | {"transformer.wte.weight@1"}, set()]
    away, here = ([use.ranks()[rank] for rank in (0, 1)] for use in reports)
    for there, before in zip(away, here, strict=True):
        assert there.host_bytes == before.memory[STATES] - there.memory[STATES] > 0 == before.host_bytes
        assert there.seconds[Cause(STATE_COPIES)] > 0 and Cause(STATE_COPIES) not in before.seconds
    assert reports[0].step_time_s > reports[1].step_time_s

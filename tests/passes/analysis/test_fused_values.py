"""What fused kernels compute again: cheap values alone, fewer bytes kept, and the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from passes.analysis.fused_values import fused_again, fused_sets
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.live_memory import GraphMemory
from tests.helpers import captured, slow_products
from tests.models import zoo

aten = torch.ops.aten


class Gated(nn.Module):
    """A layer of a LLaMA without attention, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(8), *(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.down(nn.functional.silu(self.gate(normed)) * self.up(normed)).square().mean()


def kept_operators(graph: fx.GraphModule, block: int) -> list[str]:
    """What makes the values of a block that are kept."""
    kept, _ = fused_sets(graph)[block]
    makers = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).block == block and meta_of(node).value in kept:
            makers.setdefault(meta_of(node).value, node)
    return [str(node.target).removeprefix("aten.") for _, node in sorted(makers.items())]


def test_products_are_kept_and_what_is_made_of_them_is_not() -> None:
    """The norm is computed again from what enters, the gate from two products, the square's root from the third."""
    graph = captured(Gated().double(), (torch.randn(2, 4, 8, dtype=torch.float64),))
    assert kept_operators(graph, 0) == ["mm.default"] * 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fewer_bytes_wait_and_only_cheap_operators_run_again(name: str) -> None:
    graph, plan, cluster = captured(*zoo.MODELS[name](layers=2)), Plan.uniform((2,), ("tensor",)), slow_products((2,))
    eager, fused = (lower(graph, plan, cluster, control=PassControl(fuses=fuses)) for fuses in (False, True))
    assert isinstance(eager, Lowered) and isinstance(fused, Lowered)
    calls = [[n for n in each.halves.backward.graph.nodes if n.op == "call_function"] for each in (eager, fused)]
    none, again = ([node for node in nodes if meta_of(node).again] for nodes in calls)
    assert again and not none
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    assert not products & {node.target for node in again}
    waiting = [sum(GraphMemory((2,)).use(lowered).step.values()) for lowered in (eager, fused)]
    assert waiting[1] < 0.85 * waiting[0]


@pytest.mark.slow
def test_steps_are_those_of_one_device() -> None:
    """Beside blocks that recompute all, under roles of all kinds, what waits on the host included."""
    model, inputs = zoo.llama()
    graph = galvatron_fx.capture(model, inputs)
    roles = [("data", "tensor"), ("zero", "sequence"), ("data", "tensor_sequence"), ("zero", "data"), ("data", "zero")]
    strategies = [Strategy(each) for each in roles]
    strategies[3] = replace(strategies[3], recompute=True)
    _, count = fused_sets(graph)[1]
    strategies[1] = replace(strategies[1], offloads=(0, 3), num_values=count)
    fused = fused_again(strategies, graph)
    assert fused[3] == strategies[3] and {0, 3} <= set(fused[1].keeps) and fused[1].offloads == (0, 3)
    report = galvatron_fx.check(model, (2, 2), inputs, Plan.from_roles((2, 2), fused), steps=2)
    assert report.ok, str(report)

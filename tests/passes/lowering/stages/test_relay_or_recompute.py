"""What stages pass on though each could compute it from the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_stages import LowerStages
from passes.lowering.stages.relay_or_recompute import RelayOrRecompute
from tests.graphs import Builder
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate_stages, uniform

aten = torch.ops.aten


def block_of(node: fx.Node) -> int:
    """Every block a stage."""
    return max(meta_of(node).block, 0)


def masked(blocks: Sequence[int]) -> fx.GraphModule:
    """``e = exp(exp(x))`` made in block 1, and multiplied with a parameter in each of ``blocks``."""
    build = Builder()
    x, w = build.input("x", (4, 8)), build.input("w", (4, 8), "param")
    build.block = 1
    e = build.call(aten.exp.default, build.call(aten.exp.default, x))
    for build.block in blocks:
        w = build.call(aten.mul.Tensor, w, e)
    return build.finish(("output", "0", w))


@pytest.mark.parametrize(
    ("blocks", "compute_s", "relayed"),
    [
        ((1, 2), 1.0, ["exp_1"]),  # 2 s to compute again, 1.5 s to send
        ((1, 2), 0.7, []),
        ((1, 3), 1.0, []),  # two hops
        ((1, 2, 3), 1.0, ["exp_1"]),  # two hops, or twice again
        ((0, 2), 9.0, []),  # nothing travels backwards
        ((1,), 9.0, []),
    ],
)
def test_the_cheaper_is_taken(blocks: tuple[int, ...], compute_s: float, relayed: list[str]) -> None:
    chosen = RelayOrRecompute(block_of, lambda _: compute_s, lambda size_bytes: 1.5 * size_bytes / (4 * 8 * 8))
    assert [node.name for node in chosen.relayed(masked(blocks))] == relayed


def test_truth_values_are_computed_again() -> None:
    build = Builder()
    x, w = build.input("x", (4, 8)), build.input("w", (4, 8), "param")
    positive = build.call(aten.gt.Scalar, x, 0)
    build.block = 1
    graph = build.finish(("output", "0", build.call(aten.mul.Tensor, w, positive)))
    assert not RelayOrRecompute(block_of, lambda _: 9.0, lambda _: 1.0).relayed(graph)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, spectrum: Tensor) -> Tensor:
        return x + spectrum * self.down(nn.functional.gelu(self.up(x)))


class Spectral(nn.Module):
    """Layers that all take what a long computation makes of the input alone."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        spectrum = x
        for _ in range(self.rounds):
            spectrum = torch.tanh(spectrum @ spectrum.transpose(1, 2) @ spectrum)
        for layer in self.layers:
            x = layer(x, spectrum)
        return x.square().mean()


@pytest.mark.parametrize(("rounds", "is_relayed"), [(6, True), (0, False)])
def test_of_a_lowered_model(rounds: int, is_relayed: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Spectral(rounds).double(), (torch.randn(4, 8, 8, dtype=torch.float64),)
    graph = captured(model, inputs)
    strategies, cuts = uniform(graph, "pipeline", "data"), (0, num_blocks(graph) // 2)
    lowered = LowerStages(strategies, cuts, 2, Cluster(DEVICE, axes((2, 2)))).run(graph)
    assert len(lowered.stages[0].sends) == 1 + is_relayed
    table = make_schedule("1f1b", 2, 2, 2)
    got = simulate_stages(graph, model, inputs, (2, 2), strategies, cuts, table)
    assert_exact(got, one_device(model, inputs))

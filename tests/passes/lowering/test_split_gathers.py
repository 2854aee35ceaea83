"""Parameters that are gathered in slices: the same results, and no more than a slice whole at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.collectives import all_gather, reduce_scatter
from galvatron_fx.ir.graph.layout import layout
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.lowering.lower_step import Lower, Lowered
from passes.simulation.live_memory import GraphMemory
from tests.graphs import listing
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate, simulate_stages, uniform
from tests.models.mixtures import mixture
from tests.models.zoo import gpt2, tokens
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

ZERO = Strategy(("zero",))
VOCABULARY = 512


class Words(nn.Module):
    """A vocabulary far larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(VOCABULARY, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        return F.cross_entropy(self.head(x + torch.relu(self.up(x))).flatten(0, 1), labels.flatten())


def words() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Words().double(), {"ids": torch.randint(VOCABULARY, (4, 1)), "labels": torch.randint(VOCABULARY, (4, 1))}


def lowered(graph: fx.GraphModule, strategy: Strategy, sizes: tuple[int, ...] = (2,)) -> Lowered:
    return Lower([strategy] * num_blocks(graph), Cluster(DEVICE, axes(sizes))).run(graph)


def peak_bytes(program: Lowered) -> int:
    return sum(GraphMemory(layout(program.joint).shape).use(program).step.values())


class TestGraph(expecttest.TestCase):
    def test_a_product_and_its_gradient(self) -> None:
        """One slice is gathered, used and let go of before the next; so is what gradients are scattered from."""
        graph = captured(nn.Sequential(nn.Linear(6, 4)).double(), (torch.randn(2, 6).double(),))
        program = lowered(graph, replace(ZERO, split_gathers=2))
        self.assertExpectedInline(
            listing(program.halves.forward),
            """\
primals_1: [2, 6]
primals_2: [2]
primals_3: [2, 6]
all_gather_1 = all_gather(primals_2, 0, 1, 0): [4]
only_first = only_first(all_gather_1, 0): [4]
only_first_1 = only_first(primals_3, 0): [2, 6]
slice_tensor = slice.Tensor(primals_1, 1, 0, 3): [2, 3]
all_gather_2 = all_gather(slice_tensor, 0, 1, 0): [4, 3]
t_default = t(all_gather_2): [3, 4]
slice_tensor_1 = slice.Tensor(only_first_1, 1, 0, 3): [2, 3]
addmm_default = addmm(only_first, slice_tensor_1, t_default): [2, 4]
slice_tensor_2 = slice.Tensor(primals_1, 1, 3, 6): [2, 3]
all_gather_3 = all_gather(slice_tensor_2, 0, 1, 0): [4, 3]
t_default_1 = t(all_gather_3): [3, 4]
slice_tensor_3 = slice.Tensor(only_first_1, 1, 3, 6): [2, 3]
addmm_default_1 = addmm(addmm_default, slice_tensor_3, t_default_1): [2, 4]
all_reduce_1 = all_reduce(addmm_default_1, sum, 0): [2, 4]
return [all_reduce_1, primals_3]""",
        )
        self.assertExpectedInline(
            listing(program.halves.backward),
            """\
primals_3: [2, 6]
tangents_1: [2, 4]
'only_first_2 = only_first(tangents_1, 0): [2, 4]
't_1 = t(only_first_2): [4, 2]
'all_reduce = all_reduce(t_1, sum, 0): [4, 2]
'sum_1 = sum.dim_IntList(tangents_1, [0], True): [1, 4]
'view = reshape(sum_1, [4]): [4]
'shard_1 = shard(view, 0, 1, 0): [2]
'mm = mm(all_reduce, primals_3): [4, 6]
'shard = shard(mm, 0, 1, 0): [2, 6]
return [shard, shard_1, None]""",
        )


@pytest.mark.parametrize("slices", [2, 3, 5])
def test_exact_and_smaller(slices: int) -> None:
    """12 columns are cut in two or three, not in five. The peak was that of a vocabulary: it falls by what is less."""
    model, inputs = words()
    graph, expected = captured(model, inputs), one_device(model, inputs)
    strategy = replace(ZERO, split_gathers=slices)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "zero", split_gathers=slices), {}), expected)
    program, whole = lowered(graph, strategy), lowered(graph, ZERO)
    sizes = [meta_of(node).spec.numel for node in program.joint.graph.nodes if node.target is all_gather]
    assert max(sizes) == VOCABULARY * 12 // (1 if slices == 5 else slices)
    scattered = [n.all_input_nodes[0] for n in program.joint.graph.nodes if n.target is reduce_scatter]
    assert max(meta_of(node).spec.numel for node in scattered) == max(sizes)
    saved = peak_bytes(whole) - peak_bytes(program)
    weight = 8 * VOCABULARY * 12
    assert saved == 0 if slices == 5 else saved >= weight - weight // slices


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"gather_late": True}])
def test_tied_weights_and_neighbours(options: dict[str, Any]) -> None:
    """A tied vocabulary's gradient is summed up over the model, and stays whole; blocks without slices stay."""
    model, inputs = gpt2(2)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    strategies = uniform(graph, "zero", "tensor", split_gathers=4, **options)
    strategies[1] = Strategy(("data", "zero"))
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), expected)


def test_experts() -> None:
    model = mixture("mixtral")
    inputs = tokens()
    graph, expected = captured(model, inputs), one_device(model, inputs)
    strategies = uniform(graph, "zero", split_gathers=2)
    program = Lower(strategies, Cluster(DEVICE, axes((2,)))).run(graph)
    assert any(
        len(meta_of(n).spec.shape) == 3 and meta_of(n).stays
        for n in program.joint.graph.nodes
        if n.target is all_gather
    )
    assert_exact(simulate(graph, model, inputs, (2,), strategies, {}), expected)


def test_stages() -> None:
    model, inputs = words()
    graph, expected = captured(model, inputs), one_device(model, inputs)
    strategies = uniform(graph, "pipeline", "zero", split_gathers=3)
    schedule = make_schedule("zb_h1", 2, 2, 2)
    got = simulate_stages(graph, model, inputs, (2, 2), strategies, [0, num_blocks(graph) - 1], schedule)
    assert_exact(got, expected)

"""The batch is found inside flattened dims, whichever order the model keeps, and is split there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.placement import Shard
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from passes.sharding.roles import RoleRules
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, axes, captured, one_device, simulate, uniform

aten = torch.ops.aten


class SequenceFirst(nn.Module):
    """A product of ``[sequence * batch, 8]``, as in torch's own multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, 8)
        return torch.tanh(self.linear(rows)).square().mean()


def case() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return SequenceFirst().double(), (torch.randn(4, 6, 8, dtype=torch.float64),)


def test_runs_before_the_batch() -> None:
    graph = captured(*case())
    (tanh,) = graph.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert meta_of(tanh).spec.dims == (BATCH * SEQUENCE, 8)
    assert meta_of(tanh).spec.batch_split_factors == (6, 1), "six tokens, each of all samples"


@pytest.mark.parametrize(("role", "rows"), [("data", 12), ("sequence", 12)])
def test_products_are_split(role: str, rows: int) -> None:
    model, inputs = case()
    graph = captured(model, inputs)
    sharded = ShardGraph(uniform(graph, role), axes((2,)), DEVICE, {}).run(graph)
    (tanh,) = sharded.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert meta_of(tanh).spec.shape == (rows, 8)
    assert meta_of(tanh).spec.batch_split_factors == ((6, 1) if role == "data" else (3, 1))
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, role), {}), one_device(model, inputs), role)


def test_roles_tell_batch_from_sequence() -> None:
    mixed = BATCH * SEQUENCE
    batch_first = TensorSpec((24, 8), torch.float64, (mixed, 8))
    sequence_first = TensorSpec((24, 8), torch.float64, (mixed, 8), (6, 1))
    role = RoleRules("data", 2, batch=4)
    assert [role.splits_batch(batch_first, Shard(0, split_factor)) for split_factor in (1, 4, 6)] == [
        True,
        False,
        False,
    ]
    assert [role.splits_batch(sequence_first, Shard(0, split_factor)) for split_factor in (1, 3, 6)] == [
        False,
        False,
        True,
    ]
    assert role.boundary(sequence_first) == Shard(0, 6)
    assert RoleRules("sequence", 2, 4).boundary(batch_first) == Shard(0, 4)
    assert RoleRules("sequence", 2, 4).boundary(sequence_first) == Shard(0)

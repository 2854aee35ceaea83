"""Products that torch has in narrow floats alone, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers import MixtralConfig, MixtralForCausalLM

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.checking.wide_floats import WideFloats
from galvatron_fx.errors import InputError

ENDS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("shapes", [((8, 4), (4, 4, 8)), ((4, 4, 8), (8, 8)), ((4, 8), (8, 4)), ((2, 4, 8), (2, 8, 4))])
def test_grouped_products_equal_torchs_own(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Rows, columns and the inner dim in groups, some of them empty; and products of batches."""
    torch.manual_seed(0)
    left, right = (torch.randn(shape) for shape in shapes)
    ends = None if left.ndim == right.ndim == 3 else ENDS
    with WideFloats():
        wide = grouped_mm(left, right, offs=ends)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), grouped_mm(left, right, offs=ends))


@pytest.mark.slow
def test_a_check_holds_routed_experts_as_shipped_against_eager() -> None:
    """They are traced by another operator than the one that eager runs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_attention_heads=2, num_key_value_heads=1, **sizes))
    ids = torch.randint(16, (4, 8))
    found = galvatron_fx.check(model, 2, {"input_ids": ids, "labels": ids}, Plan.uniform((2,), ("expert",)))
    assert found.ok, str(found)
    assert any(row.kind == "gradient" and row.name.endswith("experts.gate_up_proj") for row in found.rows)


class Grouped(nn.Module):
    """Experts by torch's own grouped products, whose fake kernel knows bfloat16 alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape)) for shape in ((8, width), (width, 8)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = nn.functional.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
        rows = grouped_mm(torch.relu(grouped_mm(tokens[order], self.up, offs=ends)), self.down, offs=ends)
        return torch.zeros_like(tokens).index_add(0, order, rows * weight[order, None]).pow(2).mean()


def test_grouped_products_are_traced_in_the_dtypes_that_they_run_in() -> None:
    x = torch.randn(4, 2, 8)
    found = galvatron_fx.check(Grouped(), 2, (x,), Plan.uniform((2,), ("expert",)))
    assert found.ok and {row.name for row in found.rows} >= {"up", "down"}, str(found)
    kept = galvatron_fx.capture(Grouped().half(), (x.half(),))
    assert any("grouped_mm" in str(node.target) for node in kept.graph.nodes)


def test_grouped_products_that_torch_refuses_are_refused() -> None:
    x = torch.randn(4, 2, 8)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        Grouped(6)(x)
    with pytest.raises(InputError, match="strides of grouped_mm should be multiples of 16 bytes"):
        galvatron_fx.capture(Grouped(6), (x,))

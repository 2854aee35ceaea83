"""Products that torch has in narrow floats alone, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grouped_mm
from transformers import MixtralConfig, MixtralForCausalLM

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.checking.wide_floats import WideFloats

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


def test_a_check_holds_routed_experts_as_shipped_against_eager() -> None:
    """They are traced by another operator than the one that eager runs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_attention_heads=2, num_key_value_heads=1, **sizes))
    ids = torch.randint(16, (4, 8))
    found = galvatron_fx.check(model, 2, {"input_ids": ids, "labels": ids}, Plan.uniform((2,), ("expert",)))
    assert found.ok, str(found)
    assert any(row.kind == "gradient" and row.name.endswith("experts.gate_up_proj") for row in found.rows)

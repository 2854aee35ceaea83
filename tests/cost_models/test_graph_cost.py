"""The formula of a step: of a transformer, the textbook's; of any graph, the sum of what its nodes cost."""

from __future__ import annotations

import expecttest
import pytest
import sympy
import torch
from torch import Tensor, nn

import galvatron_fx
from cost_models.formula_text import cost_note, formula_text
from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, axes, captured, uniform
from tests.models import zoo
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture)

b, s = BATCH, SEQUENCE


class Line(nn.Module):
    """A matrix product and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).square().mean()


@pytest.mark.slow
def test_a_llama_costs_what_the_textbook_says() -> None:
    """6 flops a parameter of products and token; 7 b h s^2 a layer, causal attention counting half: 2 forth, 5 back."""
    layers = 2
    model, inputs = zoo.llama(layers)
    cost = galvatron_fx.graph_cost(captured(model, inputs))
    weights = dict(model.named_parameters())
    products = sum(w.numel() for name, w in weights.items() if w.dim() > 1 and "embed" not in name)
    assert cost.parameters == sum(w.numel() for w in weights.values()) and cost.multiplied == products
    assert sympy.expand(cost.products) == 6 * products * b * s + 7 * layers * zoo.HIDDEN * b * s**2
    assert str(cost).startswith(f"flops         6*P*b*s + {7 * layers * zoo.HIDDEN}*b*s**2 in matrix products")
    assert f"P = {products:,} in matrix products" in str(cost)


@pytest.mark.slow
def test_a_formula_is_that_of_every_size() -> None:
    model, inputs = zoo.bert(layers=1)
    cost = galvatron_fx.graph_cost(captured(model, inputs))
    there = galvatron_fx.graph_cost(captured(model, zoo.masked_tokens(6, 24)))
    assert cost.at(6, 24) == there.at(6, 24)
    assert cost.at(6, 24).flops > cost.at(6, 23).flops


def test_a_rank_of_a_lowered_graph_does_its_part() -> None:
    graph = captured(*zoo.llama(layers=1))
    lowered = ShardGraph(uniform(graph, "data"), axes((2,)), DEVICE).run(graph)
    rank, whole = galvatron_fx.graph_cost(lowered), galvatron_fx.graph_cost(graph).at(zoo.BATCH, zoo.SEQUENCE)
    assert rank.products * 2 == whole.products and rank.parameters == whole.parameters
    assert f"{rank.products:,} in matrix products" in str(rank)


def test_without_a_sequence_numbers_need_none() -> None:
    cost = galvatron_fx.graph_cost(captured(*zoo.vit(layers=1)))
    assert type(cost.at(8).flops) is int
    assert "P*" not in str(cost)
    with pytest.raises(InputError, match="no whole number at a batch of 8 and a sequence of 0"):
        galvatron_fx.graph_cost(captured(*zoo.llama(layers=1))).at(8)


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (sympy.Integer(8192), "8,192"),
        (b, "b"),
        (2048 * b * s + 7 * b * s**2 + 5, "7*b*s**2 + 2,048*b*s + 5"),
        (b * (s - 1), "b*s - b"),
        (b / 2, "1/2*b"),
    ],
)
def test_formulas_as_text(formula: object, text: str) -> None:
    assert formula_text(formula) == text


class TestListings(expecttest.TestCase):
    def test_nodes_with_formulas(self) -> None:
        graph = galvatron_fx.capture(Line(), (torch.ones(4, 6, 8),))
        self.assertExpectedInline(
            listed(graph),
            """\
t: "f32[8, 2]" = t.default(primals_1);  primals_1 = None  # free
view: "f32[24, 8]" = view.default(primals_2, [24, 8]);  primals_2 = None  # free
mm: "f32[24, 2]" = mm.default(view, t);  t = None  # 32*b*s flops, 32*b*s + 64 B read, 8*b*s B written
_unsafe_view: "f32[4, 6, 2]" = _unsafe_view.default(mm, [4, 6, 2]);  mm = None  # free
pow_1: "f32[4, 6, 2]" = pow.Tensor_Scalar(_unsafe_view, 2)  # 2*b*s flops, 8*b*s B read, 8*b*s B written
mean: "f32[]" = mean.default(pow_1);  pow_1 = None  # 2*b*s flops, 8*b*s B read, 4 B written
expand: "f32[4, 6, 2]" = expand.default(tangents_1, [4, 6, 2]);  tangents_1 = None  # free
div: "f32[4, 6, 2]" = div.Scalar(expand, 48);  expand = None  # 2*b*s flops, 8*b*s B read, 8*b*s B written
pow_2: "f32[4, 6, 2]" = pow.Tensor_Scalar(_unsafe_view, 1.0);  _unsafe_view = None  # 2*b*s flops, 8*b*s B read, 8*b*s B written
mul: "f32[4, 6, 2]" = mul.Scalar(pow_2, 2.0);  pow_2 = None  # 2*b*s flops, 8*b*s B read, 8*b*s B written
mul_1: "f32[4, 6, 2]" = mul.Tensor(div, mul);  div = mul = None  # 2*b*s flops, 16*b*s B read, 8*b*s B written
view_1: "f32[24, 2]" = view.default(mul_1, [24, 2]);  mul_1 = None  # free
t_1: "f32[2, 24]" = t.default(view_1);  view_1 = None  # free
mm_1: "f32[2, 8]" = mm.default(t_1, view);  t_1 = view = None  # 32*b*s flops, 40*b*s B read, 64 B written""",  # noqa: E501
        )

    def test_nodes_of_a_rank_with_numbers_and_placements(self) -> None:
        graph = captured(Line(), (torch.ones(4, 6, 8),))
        lowered = ShardGraph(uniform(graph, "data"), axes((2,)), DEVICE).run(graph)
        self.assertExpectedInline(
            listed(lowered),
            """\
t: "f32[8, 2]" = t.default(primals_1);  primals_1 = None  # free; R
shard: "f32[2, 6, 8]" = galvatron_fx_ir_graph_collectives_shard(primals_2, 0, 1, 0);  primals_2 = None  # S(0)
view: "f32[12, 8]" = reshape.default(shard, [12, 8]);  shard = None  # free; S(0)
mm: "f32[12, 2]" = mm.default(view, t);  t = None  # 384 flops, 448 B read, 96 B written; S(0)
_unsafe_view: "f32[2, 6, 2]" = reshape.default(mm, [2, 6, 2]);  mm = None  # free; S(0)
pow_1: "f32[2, 6, 2]" = pow.Tensor_Scalar(_unsafe_view, 2)  # 24 flops, 96 B read, 96 B written; S(0)
mean: "f32[]" = mean.default(pow_1);  pow_1 = None  # 24 flops, 96 B read, 4 B written; P(avg)
expand: "f32[2, 6, 2]" = expand.default(tangents_1, [2, 6, 2]);  tangents_1 = None  # free; S(0)
div: "f32[2, 6, 2]" = div.Scalar(expand, 48);  expand = None  # 24 flops, 96 B read, 96 B written; S(0)
pow_2: "f32[2, 6, 2]" = pow.Tensor_Scalar(_unsafe_view, 1.0);  _unsafe_view = None  # 24 flops, 96 B read, 96 B written; S(0)
mul: "f32[2, 6, 2]" = mul.Scalar(pow_2, 2.0);  pow_2 = None  # 24 flops, 96 B read, 96 B written; S(0)
mul_1: "f32[2, 6, 2]" = mul.Tensor(div, mul);  div = mul = None  # 24 flops, 192 B read, 96 B written; S(0)
view_1: "f32[12, 2]" = reshape.default(mul_1, [12, 2]);  mul_1 = None  # free; S(0)
t_1: "f32[2, 12]" = t.default(view_1);  view_1 = None  # free; S(1)
mm_1: "f32[2, 8]" = mm.default(t_1, view);  t_1 = view = None  # 384 flops, 480 B read, 64 B written; P(sum)
all_reduce: "f32[]" = galvatron_fx_ir_graph_collectives_all_reduce(mean, 'avg', 0);  mean = None  # R
all_reduce_1: "f32[2, 8]" = galvatron_fx_ir_graph_collectives_all_reduce(mm_1, 'sum', 0);  mm_1 = None  # R""",  # noqa: E501
        )


def listed(graph: torch.fx.GraphModule) -> str:
    """The lines that say what a node costs."""
    lines = (line.strip() for line in readable(graph, cost_note).splitlines())
    return "\n".join(line.replace("torch.ops.aten.", "") for line in lines if " = torch.ops" in line or "  # " in line)

"""Mixtures of experts as transformers ships them: exact under every role, and no work that is done twice."""

from __future__ import annotations

import copy
import re
from functools import cache

import pytest
import torch
import transformers.integrations.moe as moe
from torch import fx, nn

from cost_models.graph_cost import graph_cost
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph.collectives import all_reduce
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import EXPERT_ROLES, Strategy
from passes.analysis.blocks import fingerprints, num_blocks
from passes.analysis.storages import is_view
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, simulate_stages, uniform
from tests.models import zoo
from tests.models.mixtures import FAMILIES, mixture


@cache
def case(family: str) -> tuple[nn.Module, dict[str, torch.Tensor], fx.GraphModule, dict[str, torch.Tensor]]:
    model, inputs = mixture(family), zoo.tokens()
    return model, inputs, captured(model, inputs), one_device(model, inputs)


PLANS = [
    (("data", "zero"), False, 1), (("sequence",), True, 1), (("zero", "tensor"), False, 1),
    (("tensor_sequence",), True, 1), (("expert",), True, 0.25), (("zero", "expert"), False, 1),
    (("expert", "tensor"), False, 0.25), (("data", "expert_sequence"), True, 2),
    (("tensor_sequence", "expert"), False, 1.25),
]  # fmt: skip


# Each plan with one of the mixtures of plain softmax routers, and with one of shared experts and groups or of biases;
# benchmarks/correctness/experts_grid.py trains all families by all plans.
PAIRS = [
    (family, *plan)
    for number, plan in enumerate(PLANS)
    for family in (("mixtral", "qwen3", "olmoe")[number % 3], ("deepseek", "gpt_oss")[number % 2])
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family, roles, recompute, capacity", PAIRS, ids=str)
def test_experts_are_exact(family: str, roles: tuple[str, ...], recompute: bool, capacity: float) -> None:
    model, inputs, graph, expected = case(family)
    strategies = uniform(graph, *roles, recompute=recompute, capacity=capacity)
    assert_exact(simulate(graph, model, inputs, (2,) * len(roles), strategies, {}), expected)


def routers(model: nn.Module) -> list[torch.Tensor]:
    """The weights that score experts, a row for each."""
    return [p for name, p in model.named_parameters() if re.search(r"\.(gate|router)\.weight$", name)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_routers_without_an_order(family: str) -> None:
    """All tokens go to the same experts: others, and ranks, have none."""
    trained, inputs, graph, _ = case(family)
    model = copy.deepcopy(trained)
    with torch.no_grad():
        assert [weight.zero_() for weight in routers(model)]
    strategies = uniform(graph, "expert", "expert" if family != "qwen3" else "data", capacity=0.5)
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), one_device(model, inputs))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_stages_and_microbatches_are_exact(family: str) -> None:
    """Not of a router in float32, whose products round otherwise for fewer tokens."""
    model, inputs, graph, expected = case(family)
    for role, name in (("data", "1f1b"), ("expert", "zb_h1")):
        schedule = make_schedule(name, 2, 2, 2)
        strategies, first = uniform(graph, "pipeline", role, capacity=0.5), (0, num_blocks(graph) // 2)
        assert_exact(simulate_stages(graph, model, inputs, (2, 2), strategies, first, schedule), expected)


def test_gradients_of_experts_do_not_wait_whole() -> None:
    """Their products make them along with those of inputs, and there they are scattered and added up."""
    graph = case("mixtral")[2]
    strategies = uniform(graph, "pipeline", "zero")
    stages = LowerStages(strategies, (0, 3), 2, cluster_for((2, 2), strategies)).run(graph).stages
    assert len(stages[-1].tasks["input_grad"].sums) == 2  # the two weights of the experts of its layer


def test_data_adds_up_what_zero_has_scattered() -> None:
    """Gradients are reduced behind views of them, where shares of them lie."""
    graph = case("mixtral")[2]
    strategies = uniform(graph, "data", "zero")
    lowered = Lower(strategies, cluster_for((2, 2), strategies), {}).run(graph).joint
    reduced = [node for node in lowered.graph.nodes if node.target is all_reduce]
    assert reduced and not any(is_view(user) for node in reduced for user in node.users if user.op == "call_function")


def test_a_loss_that_balances_experts_allows_no_microbatches() -> None:
    """It multiplies means over the whole batch."""
    graph = case("qwen3")[2]
    strategies = uniform(graph, "pipeline", "data")
    with pytest.raises(PlanError, match=r"couples the samples .* 2 micro-batches .* output_router_logits=False"):
        LowerStages(strategies, (0, 2), 2, cluster_for((2, 2), strategies)).run(graph)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gpt_oss", "olmoe", "deepseek"])
def test_neighbours_are_unlike(family: str) -> None:
    """Experts exchanged in some blocks only, over one axis or both: experts are gathered or cut between them."""
    model, inputs, graph, expected = case(family)
    roles = [("expert", "zero"), ("data", "expert"), ("tensor", "expert"), ("expert", "expert"), ("zero", "sequence")]
    strategies = [Strategy(roles[i % len(roles)], recompute=i % 2 == 1) for i in range(num_blocks(graph))]
    assert_exact(simulate(graph, model, inputs, (2, 2), strategies, {}), expected)


def expert_blocks(graph: fx.GraphModule) -> set[int]:
    """The blocks that bring tokens to experts."""
    return {meta_of(node).block for node in graph.graph.nodes if node.target is route}


def folded(graph: fx.GraphModule, attention: Strategy, experts: Strategy) -> list[Strategy]:
    """One strategy for the blocks of experts, another for all others."""
    inside = expert_blocks(graph)
    return [experts if block in inside else attention for block in range(num_blocks(graph))]


FOLDED = [
    (Strategy(("data", "tensor_sequence")), Strategy(("data", "expert"), recompute=True)),
    (Strategy(("tensor_sequence", "tensor"), recompute=True), Strategy(("expert_sequence", "tensor"))),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
@pytest.mark.parametrize("attention, experts", FOLDED, ids=["recomputed experts", "recomputed attention"])
def test_folded_plans_are_exact(family: str, attention: Strategy, experts: Strategy) -> None:
    """Attention and experts of one layer give the same axes unlike roles; one of both is computed again."""
    model, inputs, graph, expected = case(family)
    assert_exact(simulate(graph, model, inputs, (2, 2), folded(graph, attention, experts), {}), expected)


MORE_AXES = [
    ("mixtral", Strategy(("data", "tensor_sequence")), Strategy(("expert", "expert"), capacity=0.25)),
    (
        "deepseek",
        Strategy(("data", "tensor_sequence", "tensor")),
        Strategy(("expert", "expert_sequence", "tensor"), recompute=True),
    ),
    (
        "deepseek",
        Strategy(("data", "tensor_sequence", "sequence")),
        Strategy(("expert", "expert_sequence", "expert_sequence"), capacity=0.25),
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family, attention, experts", MORE_AXES, ids=["in rounds", "beside tensor", "three axes"])
def test_axes_of_experts_that_attention_tells_apart(family: str, attention: Strategy, experts: Strategy) -> None:
    """All of them split the experts: rows are exchanged along one after the other."""
    model, inputs, graph, expected = case(family)
    strategies, sizes = folded(graph, attention, experts), (2,) * len(attention.roles)
    lowered = Lower(strategies, cluster_for(sizes, strategies), {}).run(graph).joint
    (port, node), *_ = [(p, n) for p, n in ports(lowered) if p.name.endswith("experts.gate_up_proj")]
    whole = model.get_parameter(port.name)
    degree = 2 ** sum(role in EXPERT_ROLES for role in experts.roles)
    assert meta_of(node).spec.shape[0] * degree == len(whole)
    assert_exact(simulate(graph, model, inputs, sizes, strategies, {}), expected)


def test_stages_are_cut_between_attention_and_experts() -> None:
    model, inputs, graph, expected = case("mixtral")
    strategies = folded(graph, Strategy(("pipeline", "tensor_sequence")), Strategy(("pipeline", "expert")))
    first = (0, min(expert_blocks(graph)))
    schedule = make_schedule("1f1b", 2, 2, 2)
    assert_exact(simulate_stages(graph, model, inputs, (2, 2), strategies, first, schedule), expected)


def test_attention_and_experts_are_blocks_of_their_own() -> None:
    """Equal ones in turns, cut where only the residual crosses."""
    for family in ("mixtral", "gpt_oss", "olmoe"):
        graph = case(family)[2]
        _, attention, experts, *rest, _ = fingerprints(graph)
        assert rest == [attention, experts], family
        assert expert_blocks(graph) == {2, 4}
        across = {
            node
            for node in graph.graph.nodes
            if node.op == "call_function"
            and (meta_of(node).phase, meta_of(node).block) == ("forward", 1)
            and any(meta_of(user).block == 2 and meta_of(user).phase == "forward" for user in node.users)
        }
        assert [str(node.target) for node in across] == ["aten.add.Tensor"], family


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["qwen3", "deepseek", "gpt_oss"])
def test_no_work_is_done_twice(family: str) -> None:
    """The ranks together compute what one device computes, by flops of products."""
    _, inputs, graph, _ = case(family)
    whole = graph_cost(graph).at(*inputs["input_ids"].shape).products
    for role in ("data", "zero", "tensor_sequence", "expert"):
        strategies = uniform(graph, role, capacity=1)
        lowered = Lower(strategies, cluster_for((2,), strategies), {}).run(graph).joint
        assert 2 * float(graph_cost(lowered).products) == pytest.approx(float(whole), rel=0.02), role


def test_the_library_s_experts_are_put_back() -> None:
    """So is what forward hooks of transformers record: a second capture, and eager after it, see one record a layer."""
    before = dict(moe.ALL_EXPERTS_FUNCTIONS)
    model, inputs = mixture("mixtral", num_hidden_layers=1, output_hidden_states=True), zoo.tokens()
    for _ in range(2):
        captured(model, inputs)
    assert len(model(**inputs).hidden_states) == 2
    assert dict(moe.ALL_EXPERTS_FUNCTIONS) == before

"""Mixed precision: where the casts stand, and that every plan equals one device that casts at the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.nn import functional as F

import galvatron_fx
from galvatron_fx import Cluster, Plan, Strategy
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import fingerprints, graph_fingerprint, num_blocks
from passes.frontend.capture.capture import Capture, FlatInputs
from passes.frontend.find_blocks import FindBlocks
from passes.frontend.mixed_precision import MixedPrecision
from passes.frontend.pipeline import Frontend
from passes.lowering.rematerialize import Rematerialize
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, axes, simulate, simulate_stages
from tests.models import zoo

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
WIDE = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
REDUCTIONS = (c.all_reduce, c.reduce_scatter)


class Net(nn.Module):
    """Two layers with normalisation, the size of a test; [batch, sequence, features] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def inputs() -> tuple[Tensor]:
    return (torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(0)),)


def captured(model: nn.Module, given: Any, policy: MixedPrecisionPolicy | None) -> fx.GraphModule:
    return Frontend(policy=policy).run(model, given)


def one_device(model: nn.Module, given: Any, policy: MixedPrecisionPolicy) -> dict[str, Tensor]:
    """Autograd through casts of all parameters and inputs, with nothing of ours."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(policy.param_dtype) if tensor.is_floating_point() else tensor

    own = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    flat = FlatInputs.of(given)
    args, kwargs = flat.call([cast(tensor) for tensor in flat.tensors])
    out = functional_call(model, {name: cast(p) for name, p in own.items()}, args, kwargs)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    leaves[0].backward()
    return {"output 0": leaves[0].detach()} | {f"grad {n}": p.grad for n, p in own.items() if p.grad is not None}


def lowered(graph: fx.GraphModule, *roles: str, **options: bool) -> fx.GraphModule:
    strategies = [Strategy(roles, **options)] * num_blocks(graph)
    return Rematerialize(strategies).run(ShardGraph(strategies, axes((2,) * len(roles)), DEVICE, {}).run(graph))


def calls(graph: fx.GraphModule, *targets: Callable[..., Any]) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target in targets]


def gradients(graph: fx.GraphModule) -> dict[str, fx.Node]:
    return {port.name: node for port, node in output_ports(graph) if port.kind == "grad" and node is not None}


def same(got: dict[str, Tensor], expected: dict[str, Tensor], loss: float, gradient: float) -> None:
    """Equal dtypes; equal numbers to ``loss`` and ``gradient``."""
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
    assert_exact({"output 0": got["output 0"]}, {"output 0": expected["output 0"]}, tolerance=loss)
    assert_exact(got, expected, tolerance=gradient)


# ---- what stands in the graph --------------------------------------------------------------------------------------


def test_casts_of_parameters_inputs_and_gradients() -> None:
    graph = captured(Net(), inputs(), HALF)
    parameters = [node for port, node in ports(graph) if port.kind == "param"]
    assert {meta_of(node).spec.dtype for node in parameters} == {torch.float32}
    casts = calls(graph, cast_parameter)
    assert {cast.args[0] for cast in casts} == set(parameters)
    assert all(user in casts for node in parameters for user in node.users if user.op == "call_function")
    for cast in casts:
        assert {meta_of(user).block for user in cast.users} == {meta_of(cast).block}
    assert {meta_of(node).spec.dtype for node in calls(graph, torch.ops.aten.addmm.default)} == {torch.bfloat16}
    for node in gradients(graph).values():
        assert node.target is cast_gradient and meta_of(node).spec.dtype == torch.float32


def test_inputs_stay_and_outputs_are_cast_where_the_policy_says_so() -> None:
    policy = MixedPrecisionPolicy(output_dtype=torch.float64, cast_forward_inputs=False, reduce_dtype=torch.float64)
    graph = captured(Net(), inputs(), policy)
    assert not calls(graph, cast_parameter)
    loss = next(node for port, node in output_ports(graph) if port.kind == "output")
    assert loss is not None and meta_of(loss).spec.dtype == torch.float64
    assert {meta_of(node).spec.dtype for node in calls(graph, torch.ops.aten.addmm.default)} == {torch.float32}


def test_zero_gathers_narrow_copies_again_and_reduces_wide_gradients() -> None:
    graph = lowered(captured(Net(), inputs(), HALF), "zero")
    gathers, again = calls(graph, c.all_gather), [n for n in calls(graph, c.all_gather) if meta_of(n).again]
    assert {meta_of(node).spec.dtype for node in gathers} == {torch.bfloat16}
    assert {node.args[0].target for node in gathers} == {cast_parameter}
    assert again, "backward gathers again"
    scatters = calls(graph, c.reduce_scatter)
    assert len(scatters) == len(gradients(graph)) == 6
    assert {meta_of(node).spec.dtype for node in scatters} == {torch.float32}
    assert {node.args[0].target for node in scatters} == {cast_gradient}


def test_wider_copies_are_made_behind_the_gather() -> None:
    graph = lowered(captured(Net(), inputs(), WIDE), "zero", keep_gathered=True)
    assert {meta_of(node).spec.dtype for node in calls(graph, c.all_gather)} == {torch.float32}
    assert not [node for node in calls(graph, c.all_gather, cast_parameter) if meta_of(node).again]


def test_reduced_as_computed_is_cast_behind_the_reduction() -> None:
    graph = lowered(captured(Net(), inputs(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "zero")
    assert {meta_of(node).spec.dtype for node in calls(graph, c.reduce_scatter)} == {torch.bfloat16}
    for node in gradients(graph).values():
        assert node.target is cast_gradient and node.args[0].target is c.reduce_scatter
        assert meta_of(node).spec.dtype == torch.float32


def test_activations_are_reduced_as_they_are_computed() -> None:
    """Of a tensor axis nothing but activations is reduced; of a data axis gradients, in float32, and the loss."""
    model, given = zoo.llama(layers=1)
    graph = captured(model.float(), given, HALF)
    of_tensor = [n for n in calls(lowered(graph, "tensor"), *REDUCTIONS) if meta_of(n).spec.shape]
    wide = [n for n in of_tensor if meta_of(n).spec.dtype != torch.bfloat16]
    assert of_tensor and len(wide) <= 3, "only the vocabulary-parallel loss, which the model computes in float32"
    sharded = lowered(graph, "data")
    reduced = calls(sharded, *REDUCTIONS)
    assert {meta_of(node).spec.dtype for node in reduced} == {torch.float32}
    assert all(gradient in reduced for gradient in gradients(sharded).values())


class Odd(nn.Module):
    """Gradients that are put together from parts, and one that comes through a function of the parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.tied = nn.Parameter(torch.randn(96, 64)), nn.Parameter(torch.randn(64, 64))
        self.mixed = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.joined.split([64, 32])
        h = F.linear(x, first).relu() @ self.tied
        return (F.linear(h @ self.tied.t() @ self.mixed.softmax(0), second)).square().mean()


def test_gradients_made_of_parts_are_reduced_behind_the_cast() -> None:
    sharded = lowered(captured(Odd(), inputs(), HALF), "data")
    for name in ("joined", "tied"):
        pending = [gradients(sharded)[name]]
        while pending:
            node = pending.pop()
            if node.target in REDUCTIONS:
                assert meta_of(node).spec.dtype == torch.float32, f"{name}: {node.format_node()}"
            pending += [n for n in node.all_input_nodes if meta_of(n).spec.shape == meta_of(node).spec.shape][:2]
    expected = one_device(model := Odd().double(), given := (inputs()[0].double(),), NARROW)
    graph = captured(model, given, NARROW)
    for roles in (("data",), ("zero",), ("tensor",)):
        same(simulate(graph, model, given, (2,), [Strategy(roles)] * num_blocks(graph), {}), expected, 1e-6, 1e-5)


def test_a_policy_that_casts_nothing_changes_nothing() -> None:
    model, given = Net().double(), (inputs()[0].double(),)
    plain = captured(model, given, None)
    for policy in (MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64), None):
        graph = captured(model, given, policy)
        assert readable(graph) == readable(plain)
        assert graph_fingerprint(graph) == graph_fingerprint(plain)


@pytest.mark.slow
def test_equal_layers_are_traced_once() -> None:
    model, given = zoo.llama(layers=6)
    short, whole = (
        Capture(symbolic=False, share_layers=share, policy=NARROW).run(model, given) for share in (True, False)
    )
    for one, other in zip(short.graph.nodes, whole.graph.nodes, strict=True):
        assert one.op == other.op == "output" or (one.target, meta_of(one).specs) == (
            other.target,
            meta_of(other).specs,
        )
    block_fingerprints = fingerprints(MixedPrecision().run(FindBlocks().run(short)))
    assert len(calls(short, cast_parameter)) == len(list(model.parameters()))
    assert len(block_fingerprints) > len(set(block_fingerprints))


class Kinds(nn.Module):
    """Parameters and buffers of many dtypes, some frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64), requires_grad=False)
        self.turn = nn.Parameter(torch.randn(32, dtype=torch.complex64))
        self.order = nn.Parameter(torch.randperm(64), requires_grad=False)
        self.keep = nn.Parameter(torch.rand(64) > 0.5, requires_grad=False)
        self.register_buffer("scale", torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.weight + self.frozen)[..., self.order] * self.keep * self.scale
        pairs = torch.view_as_complex(h.float().unflatten(-1, (32, 2))) * self.turn
        return torch.view_as_real(pairs).square().mean()


def test_what_is_no_real_number_is_left_alone() -> None:
    graph = captured(Kinds(), inputs(), HALF)
    named = {port.name: node for port, node in ports(graph)}
    cast = {name for name, node in named.items() if any(user.target is cast_parameter for user in node.users)}
    assert cast == {"weight", "frozen"}
    dtypes = {name: meta_of(named[name]).spec.dtype for name in ("turn", "order", "keep", "scale")}
    assert list(dtypes.values()) == [torch.complex64, torch.int64, torch.bool, torch.float32]
    assert gradients(graph).keys() == {"weight", "turn"}
    assert meta_of(gradients(graph)["turn"]).spec.dtype == torch.complex64


def test_a_model_in_half_precision_reduces_in_single() -> None:
    graph = lowered(captured(Net().bfloat16(), inputs(), MixedPrecisionPolicy(reduce_dtype=torch.float32)), "zero")
    assert not calls(graph, cast_parameter)
    assert {meta_of(node).spec.dtype for node in calls(graph, c.reduce_scatter)} == {torch.float32}
    assert {meta_of(node).spec.dtype for node in gradients(graph).values()} == {torch.bfloat16}


# ---- what it computes ----------------------------------------------------------------------------------------------


@cache
def prepared(name: str, wide: bool) -> tuple[nn.Module, Any, fx.GraphModule, dict[str, Tensor]]:
    """A model in float64 that computes in float32, or the other way round."""
    model, given = zoo.MODELS[name](layers=2)
    model, policy = (model.float(), WIDE) if wide else (model, NARROW)
    return model, given, captured(model, given, policy), one_device(model, given, policy)


SETTINGS: dict[str, tuple[Sequence[int], Strategy]] = {
    "data": ((2,), Strategy(("data",))),
    "data, kept": ((2,), Strategy(("data",), keep_gathered=True)),
    "zero": ((2, 2), Strategy(("zero", "zero"))),
    "zero x tensor, kept": ((2, 2), Strategy(("zero", "tensor"), keep_gathered=True)),
    "tensor_sequence x zero, again": ((2, 2), Strategy(("tensor_sequence", "zero"), recompute=True)),
    "sequence": ((2,), Strategy(("sequence",))),
}
# In float64 a float32 model's loss shows every misplaced cast; its gradients come back in float32.
TOLERANCES = {False: (1e-6, 1e-4), True: (1e-12, 2e-7)}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_one_device(setting: str, wide: bool) -> None:
    """GPT-2: its embedding is tied to its head."""
    model, given, graph, expected = prepared("gpt2", wide)
    sizes, strategy = SETTINGS[setting]
    same(simulate(graph, model, given, sizes, [strategy] * num_blocks(graph), {}), expected, *TOLERANCES[wide])


STAGES: dict[str, tuple[Sequence[int], Strategy, str, int, int]] = {
    "1f1b": ((2,), Strategy(("pipeline",)), "1f1b", 2, 4),
    "zb_h1, zero kept": ((2, 2), Strategy(("pipeline", "zero"), keep_gathered=True), "zb_h1", 2, 2),
    "1f1b, zero again": ((2, 2), Strategy(("pipeline", "zero"), recompute=True), "1f1b", 2, 2),
    "zbv, tensor": ((2, 2), Strategy(("pipeline", "tensor")), "zbv", 4, 4),
    "parts alone": ((2,), Strategy(("data",), keep_gathered=True), "1f1b", 1, 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("setting", STAGES)
def test_stages_and_microbatches_equal_one_device(setting: str, wide: bool) -> None:
    model, given, graph, expected = prepared("gpt2", wide)
    sizes, strategy, schedule, stages, parts = STAGES[setting]
    half = num_blocks(graph) // 2
    cuts = {1: [0], 2: [0, half], 4: [0, 1, half, half + 1]}[stages]
    table = make_schedule(schedule, 2 if stages > 1 else 1, stages, parts)
    got = simulate_stages(graph, model, given, sizes, [strategy] * num_blocks(graph), cuts, table)
    same(got, expected, *TOLERANCES[wide])


def test_dropout_draws_what_one_rank_draws() -> None:
    model, given = zoo.gpt2(layers=2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    graph = captured(model.train(), given, NARROW)
    blocks = num_blocks(graph)
    alone = simulate(graph, model, given, (1,), [Strategy(("data",))] * blocks, {})
    for roles in (("zero",), ("tensor_sequence",)):
        same(simulate(graph, model, given, (2,), [Strategy(roles, True)] * blocks, {}), alone, 1e-6, 1e-4)
    assert float(alone["output 0"]) != pytest.approx(float(prepared("gpt2", False)[3]["output 0"]), rel=1e-4)


def test_frozen_parameters_are_computed_with_and_get_no_gradient() -> None:
    model, given = zoo.llama(layers=2)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    graph = captured(model, given, NARROW)
    expected = one_device(model, given, NARROW)
    got = simulate(graph, model, given, (2,), [Strategy(("zero",))] * num_blocks(graph), {})
    assert {name for name in got if name.startswith("grad")} == {name for name in expected if name.startswith("grad")}
    same(got, expected, 1e-6, 1e-4)


# ---- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_searched_plans_are_faster_smaller_and_say_so() -> None:
    with torch.device("meta"):
        model, given = zoo.llama(layers=2)
    cluster, roles = Cluster.preset("2xA100-80GB"), ("data", "zero")
    plain = galvatron_fx.plan(model.float(), cluster, given, roles=roles)
    mixed = galvatron_fx.plan(model, cluster, given, roles=roles, mixed_precision=HALF)
    assert mixed.mixed_precision == HALF
    assert "mixed precision      computes in bfloat16, reduces gradients in float32" in str(mixed)
    assert Plan.from_json(mixed.to_json()) == mixed and "mixed_precision" not in plain.to_json()
    assert mixed.report is not None and mixed.report.chosen.time_s == pytest.approx(mixed.step_time_s, rel=0.1)
    text = galvatron_fx.explain(model, cluster, given, plan=mixed, mixed_precision=HALF, after="MixedPrecision")
    assert "cast_parameter" in text


def test_plans_of_another_precision_are_refused() -> None:
    model, given = Net(), inputs()
    cluster = Cluster.preset("2xA100-80GB")
    mixed = galvatron_fx.plan(model, cluster, given, roles=("zero",), mixed_precision=HALF)
    plain = galvatron_fx.plan(model, cluster, given, roles=("zero",))
    message = "made for mixed precision 'computes in bfloat16.*' and this is 'none'; pass mixed_precision=plan"
    with pytest.raises(PlanError, match=message):
        galvatron_fx.explain(model, cluster, given, plan=mixed)
    with pytest.raises(PlanError, match="made for mixed precision 'none' and this is 'computes in bfloat16"):
        galvatron_fx.explain(model, cluster, given, plan=plain, mixed_precision=HALF)
    by_hand = Plan.uniform((2,), ("zero",))
    by_hand.check("", (), (2,), HALF)
    assert by_hand.with_precision(HALF).mixed_precision == HALF
    with pytest.raises(PlanError, match="made for mixed precision"):
        by_hand.with_precision(HALF).check("", (), (2,))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (torch.bfloat16, "mixed_precision is torch.bfloat16: give a torch.distributed.fsdp.MixedPrecisionPolicy"),
        (MixedPrecisionPolicy(param_dtype=torch.int32), "param_dtype of mixed_precision is torch.int32: use one of"),
        (MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn), "reduce_dtype of mixed_precision is torch.float8"),
    ],
)
def test_policies_that_are_none_are_refused(policy: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        galvatron_fx.plan(Net(), Cluster.preset("8xA100-80GB"), inputs(), mixed_precision=policy)


def test_malformed_policies_in_json_are_refused() -> None:
    text = Plan.uniform((2,), ("zero",)).with_precision(HALF).to_json()
    with pytest.raises(PlanError, match=r"mixed_precision\.param_dtype"):
        Plan.from_json(text.replace("bfloat16", "float4"))

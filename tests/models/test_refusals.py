"""What cannot be done is refused before anything runs, with a message that names the cause and the remedy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import silu

import galvatron_fx
from galvatron_fx import Captured, Cluster, Pipelining, Plan, Strategy
from galvatron_fx.errors import BudgetError, CaptureError, InputError, PlanError
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import check_plan
from tests.models import zoo
from tests.models.test_odd_sizes import Convolutions, Regression
from tests.passes.lowering.test_pad_batch import Contrastive
from tests.passes.sharding.test_expert_rules import Mixture

CLUSTER = Cluster.preset("2xA100-80GB")
REGRESSION = {"x": torch.randn(4, 6), "y": torch.randn(4, 3)}


class Branches(nn.Module):
    """Decides by the value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that the error must name
            return self.layer(x).sum()
        return self.layer(-x).sum()


class Counts(nn.Module):
    """Makes a tensor whose shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h[h[:, 0] > 0].max()


class FixedPositions(nn.Module):
    """Takes token ids of one length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 8), nn.Parameter(torch.zeros(6, 8))
        self.head = nn.Linear(8, 7)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.tokens(ids) + self.positions).flatten(0, 1), ids.flatten())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one rank: this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_plan_of_another_mesh(mesh: DeviceMesh) -> None:
    plan = Plan.uniform((2, 2), ("data", "tensor"))
    with pytest.raises(PlanError, match=r"\(2, 2\).*this mesh has \(\).*search a plan"):
        galvatron_fx.compile(Regression(), mesh, REGRESSION, plan=plan)


def test_plan_of_another_model() -> None:
    plan = galvatron_fx.plan(Regression(), CLUSTER, REGRESSION)
    model, inputs = zoo.gpt2(layers=1)
    with pytest.raises(PlanError, match="search"):
        galvatron_fx.explain(model, CLUSTER, inputs, plan=plan)


@pytest.mark.parametrize(
    ("role", "told"), [("sequence", "its ranks all compute the same"), ("tensor_sequence", "it is as 'tensor'")]
)
def test_roles_without_a_sequence_are_told(role: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """And what torch logs of lengths that the model does not take is kept from people."""
    inputs = {"ids": torch.zeros(4, 6, dtype=torch.int64)}
    with pytest.warns(UserWarning, match=f"role '{role}' splits no sequence.*{told}.*or give other roles"):
        galvatron_fx.explain(FixedPositions(), CLUSTER, inputs, plan=Plan.uniform((2,), (role,)))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_role_without_experts_is_told() -> None:
    inputs = {"x": torch.randn(4, 6), "y": torch.randn(4, 3)}
    with pytest.warns(UserWarning, match="role 'expert' .* splits no experts .* it has none that tokens choose. Give"):
        galvatron_fx.explain(Regression(), CLUSTER, inputs, plan=Plan.uniform((2,), ("expert",)))


def test_experts_that_ranks_do_not_divide_are_told() -> None:
    plan, x = Plan.uniform((2, 2), ("expert", "expert")), torch.ones(8, 8, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match="its 6 experts over 4 ranks do not divide. Give the axis another role"):
        galvatron_fx.explain(Mixture(silu, 6), Cluster.preset("4xA100-80GB"), (x,), plan=plan)


def test_a_batch_that_ranks_do_not_divide_is_told_of() -> None:
    inputs = {"x": torch.randn(5, 6), "y": torch.randn(5, 3)}
    with pytest.warns(UserWarning, match="5 is not divided by 2 ranks, so 1 of 6 rows are padding, .* a multiple of 2"):
        galvatron_fx.explain(Regression(), CLUSTER, inputs, plan=Plan.uniform((2,), ("data",)))


def test_a_batch_that_cannot_be_padded_is_told_of() -> None:
    plan, inputs = Plan.uniform((2,), ("data",)), {"x": torch.randn(5, 6)}
    with pytest.warns(UserWarning, match=r"cannot be padded: 'mm.*' \(aten.mm.default\) takes the samples .* together"):
        galvatron_fx.explain(Contrastive(), CLUSTER, inputs, plan=plan)
    four = Plan.uniform((2, 2, 2), ("data",) * 3)
    with pytest.raises(PlanError, match=r"some have no sample, and it cannot be padded: .* Give a batch of at least 8"):
        galvatron_fx.explain(Contrastive(), Cluster.preset("8xA100-80GB"), inputs, plan=four)


def test_plan_with_another_number_of_blocks() -> None:
    plan = Plan.uniform((2,), ("data",), num_blocks=9)
    with pytest.raises(PlanError, match="the plan has 9 blocks and the model 1"):
        galvatron_fx.explain(Regression(), CLUSTER, REGRESSION, plan=plan)


def test_plan_after_the_inputs_changed() -> None:
    plan = galvatron_fx.plan(Regression(), CLUSTER, REGRESSION)
    other = {"x": torch.randn(8, 6), "y": torch.randn(8, 3)}
    with pytest.raises(PlanError, match="the model, its inputs, or values of these by which forward decides changed"):
        galvatron_fx.explain(Regression(), CLUSTER, other, plan=plan)


def test_cluster_of_another_size(mesh: DeviceMesh) -> None:
    with pytest.raises(PlanError, match="the cluster has 2 devices, the mesh 1"):
        galvatron_fx.compile(Regression(), mesh, REGRESSION, cluster=CLUSTER)


def test_unknown_backend(mesh: DeviceMesh) -> None:
    with pytest.raises(InputError, match="warp"):
        galvatron_fx.compile(Regression(), mesh, REGRESSION, backend="warp")


@pytest.mark.parametrize("roles", [("data", "magic"), ()])
def test_unknown_or_no_roles(roles: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="unknown role"):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, roles=roles)


def test_unknown_recompute() -> None:
    with pytest.raises(InputError, match="sometimes"):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, recompute="sometimes")


def test_kept_values_of_another_model() -> None:
    graph = galvatron_fx.capture(Regression(), REGRESSION)
    kept = Strategy(("data",), recompute=True, keeps=(0,), num_values=99)
    plan = Plan.from_roles((2,), [kept] * num_blocks(graph))
    with pytest.raises(PlanError, match=r"keeps 1 of 99 values .*search the plan again"):
        check_plan(plan, graph, CLUSTER)


def test_constraint_on_no_module() -> None:
    with pytest.raises(PlanError, match=r"'layers\.17'.*no such module"):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, constraints={"layers.17": ("data",)})


@pytest.mark.parametrize("wanted", [("data", "data"), ("magic",), Strategy(("tensor", "data"))])
def test_constraint_that_nothing_meets(wanted: Strategy | tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match=r"layers\.0"):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, constraints={"layers.0": wanted})


def test_constraints_that_contradict() -> None:
    with pytest.raises(PlanError, match="contradict"):
        galvatron_fx.plan(
            Regression(), CLUSTER, REGRESSION, constraints={"layers.0": ("data",), "layers.2": ("tensor",)}
        )


@pytest.mark.parametrize(
    "constraints", [{"layers.0": ("zero",)}, {"layers.*": ("zero",)}, {"a0": "zero"}, {"layers.*": {"a0": "zero"}}]
)
def test_constraint_is_met(constraints: dict[str, Any]) -> None:
    plan = galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, constraints=constraints)
    assert {block.strategy.roles for block in plan.blocks} == {("zero",)}


@pytest.mark.parametrize("constraints, said", [
    ({"tp": "tensor"}, "on 'tp': the mesh has no such axis of several ranks; it has a0"),
    ({"a0": "tesnor"}, "constraint 'tesnor' on 'a0': use one of the roles data, zero"),
    ({"a0": "tensor", "layers.0": ("zero",)}, "contradict"),
    ({"layers.0": {"tp": "tensor"}}, "on 'tp': the mesh has no such axis"),
    ({"layers.0": {"a0": "expert"}}, "constraint a0 the role expert on module 'layers.0': no searched strategy is"),
    ({"layers.0": {0: "tensor"}}, "roles by mesh axis, or from mesh axes"),
])  # fmt: skip
def test_roles_of_axes_that_cannot_be(constraints: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, constraints=constraints)


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": torch.randn(4, 7), "y": torch.randn(4, 3)},
        {"x": torch.randn(4, 6)},
        {"x": torch.randn(4, 6), "z": torch.randn(4, 3)},
        (torch.randn(4, 6),),
        {"x": 3.0, "y": 4.0},
        "a batch",
        {},
    ],
)
def test_inputs_that_do_not_fit(inputs: object) -> None:
    with pytest.raises(InputError):
        galvatron_fx.plan(Regression(), CLUSTER, inputs)


def test_inputs_that_do_not_fit_name_the_cause() -> None:
    with pytest.raises(InputError, match="Regression") as caught:
        galvatron_fx.plan(Regression(), CLUSTER, {"x": torch.randn(4, 7), "y": torch.randn(4, 3)})
    assert Path(__file__).parent.joinpath("test_odd_sizes.py").name in str(caught.value)


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(("model", "line"), [(Branches, "if x.sum() > 0:"), (Counts, "h[h[:, 0] > 0]")])
def test_control_flow_by_values_names_the_line(model: type[nn.Module], line: str) -> None:
    with pytest.raises(CaptureError) as caught:
        galvatron_fx.capture(model(), {"x": torch.randn(4, 6)})
    message = str(caught.value)
    assert model.__name__ in message
    assert Path(__file__).name in message
    assert f"line {_line_of(line)}" in message


@pytest.mark.slow
def test_budget_that_nothing_fits() -> None:
    """The error has the least budget found and its plan; with that budget the search succeeds."""
    captured = Captured(*zoo.gpt2(layers=1))
    with pytest.raises(BudgetError, match="no plan fits") as caught:
        galvatron_fx.plan(captured, CLUSTER, memory_budget=1000)
    error = caught.value
    assert error.plan is not None
    assert error.least_bytes == error.plan.peak_memory_bytes > 1000
    assert str(error.least_bytes) in str(error)
    plan = galvatron_fx.plan(captured, CLUSTER, memory_budget=error.least_bytes)
    assert plan.peak_memory_bytes <= error.least_bytes
    with pytest.raises(BudgetError):
        galvatron_fx.plan(captured, CLUSTER, memory_budget=int(0.8 * error.least_bytes))


@pytest.mark.parametrize("budget", ["12 elephants", "-3GiB", ""])
def test_budget_that_cannot_be_read(budget: str) -> None:
    with pytest.raises(InputError):
        galvatron_fx.plan(Regression(), CLUSTER, REGRESSION, memory_budget=budget)


def test_malformed_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform((2,), ("data",)).save(path)
    document = json.loads(path.read_text())
    document["blocks"][0]["strategy"]["roles"] = ["__import__('os')"]
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


def test_explain_of_no_pass() -> None:
    with pytest.raises(InputError, match=r"nosuch.*ShardGraph"):
        galvatron_fx.explain(Regression(), CLUSTER, REGRESSION, after="nosuch")


def test_forward_backward_without_a_loss(mesh: DeviceMesh) -> None:
    plan = Plan.uniform((1,), ("data",))
    compiled = galvatron_fx.compile(nn.Linear(6, 3), mesh, (torch.randn(4, 6),), plan=plan)
    with pytest.raises(InputError, match="no scalar loss"):
        compiled.forward_backward(torch.randn(4, 6))


def test_backward_twice(mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(Regression(), mesh, REGRESSION, plan=Plan.uniform((1,), ("data",)))
    loss = compiled(**REGRESSION)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(InputError, match="twice"):
        loss.backward()


def test_meta_module_without_initialisation(mesh: DeviceMesh) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(6, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum()

    model = nn.Sequential(Bare())
    with pytest.raises(InputError, match=r"module '0' \(Bare\).*reset_parameters"):
        galvatron_fx.compile(model, mesh, (torch.randn(4, 6),), plan=Plan.uniform((1,), ("data",)))


class Locked(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(6, 3), threading.Lock()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) - y).square().mean()


def test_what_cannot_be_copied_is_named(mesh: DeviceMesh) -> None:
    model, plan = Locked(), Plan.uniform((1,), ("data",))
    with pytest.raises(InputError, match=r"Locked cannot be copied by copy.deepcopy.*'lock': TypeError.*__deepcopy__"):
        galvatron_fx.compile(model, mesh, REGRESSION, plan=plan)
    with pytest.raises(InputError, match="'lock': TypeError"):
        galvatron_fx.check(model, (1,), REGRESSION, plan)


def test_a_wrong_batch_leaves_the_model_as_it_was() -> None:
    """Capture puts fake tensors in place of the weights, and takes them out again when it fails."""
    model = Convolutions()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError):
        galvatron_fx.capture(model, {"image": torch.randn(4, 2, 8, 8), "label": torch.zeros(4, dtype=torch.long)})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


class FrozenTower(nn.Module):
    """Four equal layers, of which the last alone trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))
        self.layers[:3].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_pipeline_ranks_without_a_parameter_that_trains_are_told(recwarn: pytest.WarningsRecorder) -> None:
    model, x = FrozenTower(), (torch.ones(4, 6),)
    galvatron_fx.explain(model, CLUSTER, x, plan=Plan.uniform((2,), ("data",)))
    assert not [warning for warning in recwarn if "pipeline rank" in str(warning.message)]
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))
    with pytest.warns(UserWarning, match="no parameter of pipeline rank 0 trains.*Give it all of model.parameters"):
        galvatron_fx.explain(model, CLUSTER, x, plan=plan)

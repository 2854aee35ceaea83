"""A check names what a broken compiler does wrong, by name and block, and is silent on right ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributions import Beta, Dirichlet, Gamma

import galvatron_fx
from galvatron_fx import CheckReport, Cluster, Plan
from galvatron_fx.checking import check as checking
from galvatron_fx.errors import DifferenceError, GalvatronError, InputError, PlanError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.lowering.lower_stages import LoweredStages
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture)

MESH = (2, 2)
ZERO_TENSOR = Plan.uniform(MESH, ("zero", "tensor"))
STAGED = Plan.uniform(MESH, ("pipeline", "data"), pipelining=Pipelining(2, 2))


class Layer(nn.Module):
    """A normalised feed-forward layer with a residual."""

    def __init__(self, width: int, dropout: float, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 30), nn.Linear(30, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Tagger(nn.Module):
    """Tied embeddings, frozen and unused parameters, running means, odd sizes, ignored labels."""

    def __init__(self, layers: int = 3, width: int = 12, dropout: float = 0.0, coupled: bool = True) -> None:
        super().__init__()
        norm = nn.RMSNorm if coupled else nn.LayerNorm  # the default epsilon of the first is that of the dtype
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList(Layer(width, dropout, norm) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if coupled else nn.Identity()
        self.head = nn.Linear(width, 17)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(2, 2)
        self.layers[0].norm.weight.requires_grad_(False)
        nn.init.zeros_(self.layers[2 % layers].down.bias)  # and its gradient is zero but for rounding

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(samples: int = 8, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(17, (samples, length), generator=generator)
    labels = torch.randint(17, (samples, length), generator=generator)
    labels[0, 2:] = -100
    return {"ids": ids, "labels": labels}


def tagger(plan: Plan = ZERO_TENSOR, **options: Any) -> Tagger:
    """A model that ``plan`` can train: statistics of the batch cannot be cut into micro-batches."""
    options["coupled"] = plan is not STAGED
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tagger(**options)


@cache
def report(plan: Plan, steps: int = 1, **options: Any) -> CheckReport:
    return galvatron_fx.check(tagger(plan), MESH, batch(), plan, steps=steps, **options)


def row(found: CheckReport, kind: str, name: str) -> Any:
    (match,) = [row for row in found.rows if (row.kind, row.name) == (kind, name)]
    return match


# ---- silent on what is right ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [ZERO_TENSOR, STAGED], ids=["zero tensor", "stages"])
def test_right_programs_are_equal(plan: Plan) -> None:
    found = report(plan, steps=2)
    assert found.ok and found.is_exact and not found.notes, str(found)
    assert "equal: " in str(found) and "2 steps on 4 simulated ranks" in str(found)
    assert found.raise_if_different() is found
    names = {(row.kind, row.name) for row in found.rows}
    assert {("loss", "loss"), ("output", "logits")} <= names
    assert (("buffer", "norm.running_var") in names) == (plan is ZERO_TENSOR)
    assert {("gradient", "embed.weight"), ("parameter", "layers.2.up.bias")} <= names
    assert not {("gradient", "spare.weight"), ("gradient", "layers.0.norm.weight")} & names
    assert row(found, "gradient", "layers.1.up.weight").block.endswith("(layers.1)")
    assert row(found, "parameter", "embed.weight").relative < 1e-12


@pytest.mark.slow
def test_a_plan_is_searched_for_a_cluster_and_for_a_number_of_ranks() -> None:
    for ranks in (Cluster.preset("2xA100-80GB"), 3):
        assert galvatron_fx.check(tagger(), ranks, batch(6), steps=1).ok


class Scores(nn.Module):
    """Outputs of which none is a loss, or several are."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(6, 8), losses

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if not self.losses:
            return y.softmax(-1), y.relu()
        return {"fit": y.square().mean(), "size": 0.1 * y.abs().mean(), "y": y}


@pytest.mark.parametrize("losses", [0, 2])
def test_no_loss_and_several(losses: int) -> None:
    x = torch.randn(4, 6)
    found = galvatron_fx.check(Scores(losses), 2, (x,), Plan.uniform((2,), ("data",)))
    assert found.ok, str(found)
    assert sum(row.kind == "loss" for row in found.rows) == losses
    assert row(found, "gradient", "linear.weight")


@pytest.mark.filterwarnings("ignore:sparse=True of an embedding")
def test_sparse_gradients_of_eager_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4))
    found = galvatron_fx.check(model, 2, (torch.randint(0, 20, (4, 5)),), Plan.uniform((2,), ("data",)), steps=2)
    assert found.ok, str(found)
    assert row(found, "gradient", "0.weight")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [ZERO_TENSOR, STAGED], ids=["zero tensor", "stages"])
def test_eager_gets_the_same_draws(plan: Plan) -> None:
    model = tagger(plan, dropout=0.4)
    found = galvatron_fx.check(model, MESH, batch(), plan, steps=2)
    assert found.ok and not found.notes, str(found)


def test_numbers_that_the_check_draws_are_none_of_the_models() -> None:
    """Outputs without a loss are weighted by random numbers; a rate of a half is an argument that torch leaves out."""
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Dropout1d(0.5), nn.Conv1d(8, 4, 3))
    found = galvatron_fx.check(model, 2, (torch.randn(4, 3, 9),), Plan.uniform((2,), ("data",)))
    assert found.ok and not found.notes, str(found)


class Drawing(nn.Module):
    """Mixes samples by a number of a beta distribution, and codes that it draws with others that it draws whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(6, 8), nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        share = Beta(x.new_tensor(0.4), x.new_tensor(0.4)).sample()
        mixed = self.linear(share * x + (1 - share) * x[torch.randperm(len(x))])
        step = self.steps(torch.empty(len(x), dtype=torch.int64).random_(0, 9))
        noise = torch.empty_like(mixed).cauchy_().tanh() + torch.empty_like(mixed).geometric_(0.3)
        code = Gamma(F.softplus(mixed), F.softplus(step) + 1).rsample() + Dirichlet(mixed.exp()).rsample()
        return (code + step * noise).square().mean()


@pytest.mark.parametrize("roles", [("data", "tensor"), ("zero", "data")], ids=" ".join)
def test_distributions_draw_alike(roles: tuple[str, ...]) -> None:
    found = galvatron_fx.check(Drawing(), (2, 2), (torch.randn(4, 6),), Plan.uniform((2, 2), roles))
    assert found.ok and not found.notes, str(found)


class Noisy(nn.Module):
    """Draws in ways that eager cannot be handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slope = nn.Linear(6, 8), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.linear(x) + 0.1 * torch.randn(8)).square().mean()


def test_unknown_draws_are_compared_with_the_captured_graph() -> None:
    found = galvatron_fx.check(Noisy(), 2, (torch.randn(4, 6),), Plan.uniform((2,), ("data",)))
    assert found.ok and "rrelu" in found.notes[0], str(found)
    assert "captured graph" in str(found)


def test_a_model_without_weights_is_initialised() -> None:
    with torch.device("meta"):
        model = Tagger(layers=1)
    found = galvatron_fx.check(model, 2, batch(), Plan.uniform((2,), ("zero",)))
    assert found.ok and row(found, "gradient", "embed.weight").relative < 1e-13
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(InputError, match="batch is on the meta device"):
        galvatron_fx.check(model, 2, {name: value.to("meta") for name, value in batch().items()})


@pytest.mark.slow
def test_lower_precision_is_held_against_the_error_of_eager() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for precision in (None, policy):
        found = report(STAGED, exact=False, mixed_precision=precision)
        assert found.ok and not found.is_exact and not found.notes, str(found)
    assert 1e-4 < row(found, "output", "logits").relative < 0.05, "bfloat16 rounds"
    assert report(STAGED, mixed_precision=policy).rows[0].relative < 1e-13, "exact also of a policy"
    coupled = report(ZERO_TENSOR, exact=False, mixed_precision=policy)
    assert coupled.ok and "eager does not run in this precision" in coupled.notes[0]


class Direction(nn.Module):
    """A loss that does not change with the only weight, so that its eight gradients are nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        return -F.cosine_similarity(self.scale * x, x.roll(1, 1), dim=-1).mean()


def test_gradients_that_are_rounding_alone_are_held_against_the_loss() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    report = galvatron_fx.check(Direction(), 2, (x,), Plan.uniform((2,), ("data",)))
    assert report.ok
    (row,) = (row for row in report.rows if row.kind == "gradient")
    assert 0 < row.absolute < 1e-15, "it differs by as much as it is"


class Skipping(nn.Module):
    """An expert without a token, which eager never calls; a router that casts itself in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        nn.init.constant_(self.router.bias[1:], -100.0)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        ids, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for expert in range(3):
            (token,) = torch.where(ids == expert)
            if token.numel():
                out.index_add_(0, token, self.experts[expert](x[token]))
        return out.square().mean() + self.router(x).square().mean()


@pytest.mark.filterwarnings("error:equal layers")
def test_values_that_are_no_numbers_are_a_note() -> None:
    batch = torch.full((4, 3), float("nan"))
    found = galvatron_fx.check(nn.Linear(3, 3), 2, (batch,), Plan.uniform((2,), ("data",)))
    assert found.ok and "'weight' of eager are no numbers (nan)" in found.notes[0], str(found)


def test_zeros_where_eager_has_no_gradient_are_a_note() -> None:
    report = galvatron_fx.check(Skipping(), 2, (torch.randn(6, 6),), Plan.uniform((2,), ("data",)), steps=2)
    assert report.ok
    assert "eager has no gradient for 'experts.1.weight', 'experts.1.bias', 'experts.2.weight'" in report.notes[0]


def test_a_buffer_that_forward_lets_need_gradients_is_no_parameter() -> None:
    class Commitment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.register_buffer("zero", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.zero.requires_grad_() + self.layer(x).square().mean()

    galvatron_fx.check(Commitment(), 2, (torch.randn(6, 5),), Plan.uniform((2,), ("data",))).raise_if_different()


@pytest.mark.slow
def test_the_model_stays_as_it_is() -> None:
    model = tagger(dropout=0.2)
    model(**batch())["loss"].backward()
    model.layers[1].eval()
    model.cache = model.head.weight * 2  # not a leaf: deepcopy alone refuses it
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: None if g is None else g.clone() for name, g in gradients.items()}
    states = torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        galvatron_fx.check(model, MESH, batch(), ZERO_TENSOR, steps=2)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert values[name] is None or torch.equal(parameter.grad, values[name])
    assert model.training and not model.layers[1].training
    assert not torch.is_anomaly_enabled() and model.head.weight is model.embed.weight


def test_misuse() -> None:
    with pytest.raises(InputError, match="at least 1"):
        galvatron_fx.check(tagger(), 2, batch(), steps=0)
    with pytest.raises(PlanError, match="axes"):
        galvatron_fx.check(tagger(), 8, batch(), ZERO_TENSOR)


# ---- loud on what is wrong -----------------------------------------------------------------------------------------

Break = Callable[[fx.GraphModule], None]


def broken(monkeypatch: pytest.MonkeyPatch, breaks: Break) -> None:
    """Have the compiler give out graphs that ``breaks`` has changed, behind every verifier."""
    lower = checking.lower

    def lowered(*args: Any, **options: Any) -> Any:
        program = lower(*args, **options)
        if isinstance(program, LoweredStages):
            graphs = [task.graph for stage in program.stages for task in stage.tasks.values()]
        else:
            graphs = [program.halves.forward, program.halves.backward]
        for graph in graphs:
            breaks(graph)
            graph.recompile()
        return program

    monkeypatch.setattr(checking, "lower", lowered)


def nodes(graph: fx.GraphModule, target: Any, module: str, phase: str = "backward") -> list[fx.Node]:
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is target]
    return [node for node in calls if meta_of(node).module.startswith(module) and meta_of(node).phase == phase]


def dropped_reduction(graph: fx.GraphModule) -> None:
    for node in nodes(graph, c.all_reduce, "layers.1"):
        node.replace_all_uses_with(node.args[0])


def wrong_scale(graph: fx.GraphModule) -> None:
    for node in nodes(graph, torch.ops.aten.mm.default, "layers.2.up") + nodes(
        graph, torch.ops.aten.addmm.default, "layers.2.up", "forward"
    ):
        with graph.graph.inserting_after(node):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
            scaled.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, lambda user, scaled=scaled: user is not scaled)


def lost_gradient(graph: fx.GraphModule) -> None:
    output = graph.graph.output_node()
    lost = {n for n in output.args[0] if isinstance(n, fx.Node) and meta_of(n).module == "layers.0.down"}
    output.args = (tuple(None if value in lost and len(value.users) == 1 else value for value in output.args[0]),)


def test_a_dropped_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, dropped_reduction)
    found = galvatron_fx.check(tagger(), MESH, batch(), Plan.uniform(MESH, ("data", "data")))
    assert not found.ok
    wrong = {row.name for row in found.different if row.kind == "gradient"}
    assert wrong and all(name.startswith("layers.1.") for name in wrong), str(found)
    assert found.rows[0].block.endswith("(layers.1)") and found.rows[0].relative > 1e-3
    assert "different: " in str(found) and "'layers.1." in str(found).splitlines()[0]
    with pytest.raises(DifferenceError, match=r"in block \d+ \(layers.1\) most") as caught:
        found.raise_if_different()
    assert isinstance(caught.value, GalvatronError)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exact", [True, False], ids=["float64", "as it is"])
@pytest.mark.parametrize("plan", [ZERO_TENSOR, STAGED], ids=["zero tensor", "stages"])
def test_a_wrong_scale_is_seen(monkeypatch: pytest.MonkeyPatch, plan: Plan, exact: bool) -> None:
    broken(monkeypatch, wrong_scale)
    found = galvatron_fx.check(tagger(plan), MESH, batch(), plan, exact=exact)
    assert any(row.name == "layers.2.up.weight" and row.kind == "gradient" for row in found.different), str(found)
    assert any(row.kind == "loss" for row in found.different)


def test_a_lost_gradient_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lost_gradient)
    found = galvatron_fx.check(tagger(), 2, batch(), Plan.uniform((2,), ("data",)))
    lost = row(found, "gradient", "layers.0.down.weight")
    assert lost.note == "missing" and found.rows[0].note == "missing" and "missing" in str(found)
    assert not row(found, "parameter", "layers.0.down.weight").is_equal

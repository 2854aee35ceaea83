"""Operators and wrappers that people bring: each is exact in every role and in micro-batches, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.schedule import make_schedule
from tests.helpers import assert_exact, captured, one_device, simulate, simulate_stages, uniform
from tests.models.test_odd_sizes import Regression

BATCH = 8
f64 = torch.float64
Body = Callable[[nn.Module, Tensor], Tensor]


class Probe(nn.Module):
    """Features of a batch of vectors, and ``body``, which makes a loss of them."""

    def __init__(self, body: Body, features: int, dtype: torch.dtype = f64) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, features, dtype=dtype), body
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


def matrices(function: Callable[[Tensor], Tensor]) -> Body:
    """A loss of what ``function`` makes of well-conditioned matrices."""

    def body(model: nn.Module, h: Tensor) -> Tensor:
        square = h.view(-1, 4, 4)
        return (function(square @ square.mT + 2 * torch.eye(4, dtype=h.dtype)) ** 2).mean()

    return body


def volumes(function: Callable[[Tensor], Tensor]) -> Body:
    """A loss of volumes of three channels."""
    return lambda model, h: (function(h.view(-1, 3, 4, 4, 4)) ** 2).mean()


def images(function: Callable[[Tensor], Tensor]) -> Body:
    """A loss of images of three channels, as high and wide as the batch is long."""
    return lambda model, h: (function(h.view(-1, 3, 8, 8)) ** 2).mean()


def spectra(model: nn.Module, h: Tensor) -> Tensor:
    window = torch.hann_window(16, dtype=h.dtype)
    size = torch.stft(h, 16, 4, window=window, return_complex=True).abs()
    return torch.log(size + 1e-5).abs().mean() + (size - 1).abs().mean()


def turned(x: Tensor) -> Tensor:
    angle = torch.tensor([[0.8, 0.6, 0.1], [-0.6, 0.8, 0.0]], dtype=x.dtype)
    grid = functional.affine_grid(angle.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def weighted_losses(model: nn.Module, h: Tensor) -> Tensor:
    """Losses stacked and weighed by learned uncertainty: a mean of squares, and a mean of absolute values."""
    return (torch.stack([(h**2).mean(), h.abs().mean()]) * torch.exp(-model.weights) + model.weights).sum()


def weighted_loss(model: nn.Module, h: Tensor) -> Tensor:
    return (h**2).mean() * torch.exp(-model.weights[:1]).squeeze()


def mean_of_a_weighted_loss(model: nn.Module, h: Tensor) -> Tensor:
    return (torch.exp(-model.weights) * (h**2).mean() + 0.5 * model.weights).mean()


def ones_like_rows(a: Tensor) -> Tensor:
    return torch.ones_like(a[..., :2])


EXACT: dict[str, tuple[Body, int]] = {
    "solve": (matrices(lambda a: torch.linalg.solve(a, ones_like_rows(a))), 16),
    "solve for a vector": (matrices(lambda a: torch.linalg.solve(a, torch.ones_like(a[..., 0]))), 16),
    "inv": (matrices(torch.linalg.inv), 16),
    "cholesky": (matrices(torch.linalg.cholesky), 16),
    "cholesky_solve": (matrices(lambda a: torch.cholesky_solve(ones_like_rows(a), torch.linalg.cholesky(a))), 16),
    "det": (matrices(torch.linalg.det), 16),
    "slogdet": (matrices(lambda a: torch.linalg.slogdet(a)[1]), 16),
    "eigh": (matrices(lambda a: torch.linalg.eigh(a)[0]), 16),
    "svdvals": (matrices(torch.linalg.svdvals), 16),
    "qr": (matrices(lambda a: torch.linalg.qr(a)[1]), 16),
    "max_pool3d": (volumes(lambda x: functional.max_pool3d(x, 2)), 192),
    "adaptive_max_pool3d": (volumes(lambda x: functional.adaptive_max_pool3d(x, 2)), 192),
    "adaptive_avg_pool3d": (volumes(lambda x: functional.adaptive_avg_pool3d(x, 3)), 192),
    "adaptive_max_pool2d": (images(lambda x: functional.adaptive_max_pool2d(x, 3)), 192),
    "reflection": (images(lambda x: functional.pad(x, (1, 1, 2, 2), mode="reflect")), 192),
    "replication": (images(lambda x: functional.pad(x, (1, 1, 2, 2), mode="replicate")), 192),
    "grid_sample": (images(turned), 192),
    "spectra": (spectra, 64),
    "weighted loss": (weighted_loss, 5),
    "weighted losses": (weighted_losses, 5),
    "mean of a weighted loss": (mean_of_a_weighted_loss, 5),
}


def in_roles_and_microbatches(model: nn.Module, inputs: Any, tolerance: float = 1e-10) -> None:
    expected = one_device(copy.deepcopy(model), inputs)
    graph = captured(model, inputs)
    for roles in (("data",), ("zero", "tensor")):
        got = simulate(graph, model, inputs, [2] * len(roles), uniform(graph, *roles), {})
        assert_exact(got, expected, str(roles), tolerance)
    for count in (2, 4):
        table = make_schedule("gpipe", 1, 1, count)
        got = simulate_stages(graph, model, inputs, [2], uniform(graph, "data"), [0], table)
        assert_exact(got, expected, f"{count} micro-batches", tolerance)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    in_roles_and_microbatches(Probe(*EXACT[name]), (torch.randn(BATCH, 6, dtype=f64),))


def test_autocast_inside_of_forward() -> None:
    """Products in bfloat16 round as they do where a loop adds up the gradients of micro-batches."""

    def body(model: nn.Module, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (functional.gelu(h @ model.layer.weight) ** 2).mean()

    torch.manual_seed(0)
    in_roles_and_microbatches(Probe(body, 6, torch.float32), (torch.randn(BATCH, 6),), 2e-2)


def test_norms_in_mixed_precision_are_cut_into_micro_batches() -> None:
    """Gradients of the weights of an RMS norm are summed in float32, and rounded, as their weights were, in between."""
    model = nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 6))

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean()

    plan = Plan.uniform((2,), ["data"], pipelining=Pipelining(1, 2, "1f1b"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    galvatron_fx.check(
        Squared(), 2, (torch.randn(BATCH, 6),), plan, mixed_precision=policy, exact=False
    ).raise_if_different()


def test_chunks_of_the_sequence_as_long_as_the_batch() -> None:
    """Sizes that are equal by chance are told apart."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(11, 6, dtype=f64), nn.Linear(6, 11, dtype=f64)

        def forward(self, ids: Tensor) -> Tensor:
            h, labels = self.tokens(ids)[:, :-1], ids[:, 1:]
            total = torch.zeros((), dtype=f64)
            for part, wanted in zip(h.split(BATCH, 1), labels.split(BATCH, 1), strict=True):
                logits = self.head(part).flatten(0, 1)
                total = total + functional.cross_entropy(logits, wanted.flatten(), reduction="sum")
            return total / labels.numel()

    torch.manual_seed(0)
    in_roles_and_microbatches(Chunked(), {"ids": torch.randint(0, 11, (BATCH, 2 * BATCH + 1))})


class Bags(nn.Module):
    """Sums, means or maxima of rows of a table."""

    def __init__(self, weighted: bool, **options: Any) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(11, 6, dtype=f64, **options), nn.Linear(6, 3, dtype=f64)
        self.weights = nn.Linear(7, 7, dtype=f64) if weighted else None

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights(x)
        return (self.head(self.bags(ids, per_sample_weights=weights)) ** 2).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (False, {"mode": "sum"}),
        (False, {"mode": "mean", "padding_idx": 3}),
        (False, {"mode": "max"}),
        (False, {"mode": "max", "padding_idx": -8}),
        (True, {"mode": "sum", "padding_idx": 3}),
    ],
)
def test_bags(weighted: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (BATCH, 7))
    ids[2] = 3  # a bag of padding alone, where that is padding
    in_roles_and_microbatches(Bags(weighted, **options), {"ids": ids, "x": torch.randn(BATCH, 7, dtype=f64)})


class Lists(nn.Module):
    """Bags of unlike sizes, one of them empty, that lie behind each other in one list."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(11, 6, **options), nn.Linear(6, 3)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return (self.head(self.bags(ids, offsets, weights)) ** 2).mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (False, {"mode": "mean", "padding_idx": 3}),
        (False, {"mode": "sum", "include_last_offset": True}),
        (True, {"mode": "sum"}),
    ],
)
def test_bags_in_a_list(weighted: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = [torch.randint(0, 11, (16,)), torch.tensor([0, 3, 3, 8, 10, 16])]
    batch += [torch.randn(16)] if weighted else []
    for role in ("data", "zero", "tensor"):
        plan = galvatron_fx.Plan.uniform((2,), (role,))
        galvatron_fx.check(Lists(**options), 2, tuple(batch), plan).raise_if_different()


@pytest.mark.parametrize("bags", [False, True])
def test_sparse_gradients_become_dense(bags: bool) -> None:
    class Table(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            kind = nn.EmbeddingBag if bags else nn.Embedding
            self.rows = kind(11, 6, sparse=sparse, dtype=f64)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.rows(ids) ** 2).mean()

    model, ids = Table(sparse=False), torch.randint(0, 11, (BATCH, 7))
    expected = one_device(model, (ids,))
    sparse = Table(sparse=True)
    sparse.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="sparse=True of an embedding has no effect"):
        graph = captured(sparse, (ids,))
    assert_exact(simulate(graph, sparse, (ids,), [2], uniform(graph, "zero"), {}), expected)


class Ragged(nn.Module):
    """Takes rows of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8]))
        return self.layer(rows).values().sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_lookups_change_are_refused(kind: Any) -> None:
    model = nn.Sequential(kind(11, 6, max_norm=1.0), nn.Linear(6, 3))
    with pytest.raises(CaptureError, match=r"table of \(11, 6\).*max_norm=1.0.*weight\.renorm_\(2, 0, 1\)"):
        captured(model, (torch.randint(0, 11, (BATCH, 7)),))


def test_nested_and_sparse_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"nested tensor.*\n.*nested_tensor_from_jagged.*\n.*pad all rows"):
        captured(Ragged(), (torch.randn(8, 6),))
    rows = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(4, 6)], layout=torch.jagged)
    for given, kind in ((rows, "nested"), (torch.eye(6).to_sparse(), "sparse")):
        with pytest.raises(InputError, match=f"is {kind}: give a dense tensor"):
            captured(nn.Linear(6, 3), (given,))


class Adjacent(nn.Module):
    """A graph network whose matrix is a buffer, an attribute, or made in forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 3)
        self.register_buffer("buffer", torch.eye(8).to_sparse_csr() if kind == "buffer" else None)
        self.plain = torch.eye(8).to_sparse_csr() if kind == "csr" else torch.eye(8).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        made = {"buffer": self.buffer, "made": torch.eye(8).to_sparse()}.get(self.kind, self.plain)
        return torch.sparse.mm(made, self.linear(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["buffer", "plain", "csr", "made"])
def test_sparse_matrices_are_refused(kind: str) -> None:
    with pytest.raises((InputError, CaptureError), match=r"sparse(.|\n)*(index_add|depends on values)"):
        captured(Adjacent(kind), (torch.randn(8, 6),))


def test_a_failed_check_makes_nan() -> None:
    """Where torch would raise for a singular matrix, results are nan, and those of other samples are not."""

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=f64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(self.scale * x)

    x = torch.eye(3, dtype=f64).repeat(4, 1, 1)
    model, graph = Inverse(), captured(Inverse(), (x,))
    x[1] = 0
    with pytest.raises(torch.linalg.LinAlgError):
        model(x)
    inverse = simulate(graph, model, (x,), [2], uniform(graph, "data"), {})["output 0"]
    assert inverse[1].isnan().all()
    assert torch.equal(inverse[[0, 2, 3]], x[[0, 2, 3]])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one rank: this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


INPUTS = {"x": torch.randn(4, 6), "y": torch.randn(4, 3)}


@pytest.mark.parametrize("wrap", [DistributedDataParallel, torch.compile, nn.DataParallel])
def test_wrappers_that_change_no_result_are_taken_off(wrap: Callable[[nn.Module], Any], mesh: DeviceMesh) -> None:
    model = Regression()
    expected = model(**INPUTS)
    compiled = galvatron_fx.compile(wrap(model), mesh, INPUTS, plan=Plan.uniform((1,), ("data",)))
    torch.testing.assert_close(compiled.forward_backward(**INPUTS), expected)
    assert dict(compiled.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_weights_without_a_shape_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    for run in (galvatron_fx.capture, lambda model, x: galvatron_fx.check(model, (1,), x)):
        with pytest.raises(InputError, match=r"'0.weight' has no shape yet.*run a batch through the model first"):
            run(lazy, (INPUTS["x"],))
    lazy(INPUTS["x"])
    galvatron_fx.capture(lazy, (INPUTS["x"],))


def test_models_that_something_else_has_split_are_refused(mesh: DeviceMesh) -> None:
    plan = Plan.uniform((1,), ("data",))
    split = Regression()
    fully_shard(split)
    with pytest.raises(InputError, match="wrapped by FSDPRegression: give the model inside"):
        galvatron_fx.compile(split, mesh, INPUTS, plan=plan)
    compiled = galvatron_fx.compile(Regression(), mesh, INPUTS, plan=plan)
    with pytest.raises(InputError, match="compiled already"):
        galvatron_fx.compile(compiled, mesh, INPUTS, plan=plan)
    inner = Regression()
    inner.layers[0] = torch.compile(inner.layers[0])
    with pytest.raises(InputError, match=r"module 'layers\.0' is wrapped by OptimizedModule"):
        galvatron_fx.capture(inner, INPUTS)
    in_place = Regression()
    in_place.layers[0].compile()
    with pytest.raises(InputError, match=r"module 'layers\.0' was compiled in place.*leave that call out"):
        galvatron_fx.capture(in_place, INPUTS)


def test_a_default_device_of_the_caller_is_not_that_of_the_trace() -> None:
    """``with torch.device("meta")`` around model and plan alike is what people write."""
    expected = galvatron_fx.capture(Regression(), INPUTS).code
    with torch.device("meta"):
        assert galvatron_fx.capture(Regression(), INPUTS).code == expected

"""Run by test_ranks.py: ranks that come with unlike weights, batches, flags, options and meshes."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import Pipelining, Plan, own_rows
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from tests.models import zoo
from tests.runtime.launch import Check, fork_checks
from tests.runtime.train_ranks import same, same_parameters

aten = torch.ops.aten
ROWS, WIDTH, CLASSES = 8, 6, 5


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12, dtype=torch.float64), nn.Linear(12, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and more."""
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Two layers and a classifier; ``offset`` is no parameter, ``scale`` is handed in without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.register_buffer("offset", torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the mean loss over labels that are not -100, and logits."""
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x + self.offset) * scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch(seed: int = 0, rows: int = ROWS) -> dict[str, Tensor]:
    """A batch whose first rows are labelled, but for some."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    labels[rows // 2 + 1 :] = -100
    x = torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": labels, "scale": torch.tensor(1.5, dtype=torch.float64)}


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def uniform(role: str, mesh: DeviceMesh) -> Plan:
    return Plan.uniform((mesh.size(),), (role,))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def trains_as(compiled: nn.Module, plain: nn.Module, steps: int = 3) -> None:
    """Losses, and parameters and buffers after steps, are those of one device."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (compiled, plain)]
    for step in range(steps):
        loss = compiled.forward_backward(**batch(step))["loss"]
        expected = plain(**batch(step))["loss"]
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for name, value in (*compiled.named_parameters(), *compiled.named_buffers()):
        torch.testing.assert_close(whole(value).detach(), theirs[name].detach(), rtol=1e-10, atol=1e-10, msg=name)


@contextmanager
def one_warning(message: str) -> Iterator[None]:
    """Rank 0 warns once of it, and nobody else."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    told = [str(w.message) for w in seen if "rank 0" in str(w.message)]
    assert len(told) == (dist.get_rank() == 0), told
    assert all(re.search(message, text) for text in told), told


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """The block raises on this rank."""
    try:
        yield
    except kind as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(f"let go, instead of: {message}")


# ---- weights ----


def another_seed(role: str, mesh: DeviceMesh) -> None:
    model = model_of(seed=dist.get_rank())
    with one_warning(r"ranks \[1\] hold other values than rank 0 in 11 of 11 .*'layers\.0\.up\.weight'"):
        compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, batch(), plan=uniform(role, mesh))
    trains_as(compiled, model_of(seed=0))


def another_buffer(mesh: DeviceMesh) -> None:
    model = model_of()
    model.offset[3] += dist.get_rank()
    with one_warning(r"in 1 of 11 .*'offset'"):
        compiled = galvatron_fx.compile(model, mesh, batch(), plan=uniform("data", mesh))
    trains_as(compiled, model_of())


def swapped_values(mesh: DeviceMesh) -> None:
    """Equal sums, other places; and nan of equal bits, which is no difference."""
    model = model_of()
    with torch.no_grad():
        model.layers[0].up.bias[0] = model.head.bias[0] = float("nan")
        model.layers[1].down.bias[:2] = torch.tensor([1.0, 2.0] if dist.get_rank() else [2.0, 1.0])
    with one_warning(r"in 1 of 11 .*'layers\.1\.down\.bias'"):
        compiled = galvatron_fx.compile(model, mesh, batch(), plan=uniform("data", mesh))
    assert compiled.get_submodule("layers.1").down.bias.to_local()[:2].tolist() == [2.0, 1.0]


def same_weights_are_not_sent(mesh: DeviceMesh) -> None:
    model = model_of()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        galvatron_fx.compile(model, mesh, batch(), plan=uniform("data", mesh))
    assert not [w for w in seen if "rank 0" in str(w.message)]


def staged(mesh: DeviceMesh) -> None:
    """Tensors that only one stage holds come from rank 0, too."""
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "1f1b"))
    model, inputs = zoo.llama(layers=2)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    with one_warning(r"ranks \[1\] .* in (\d+) of \d+ parameters"):
        compiled = galvatron_fx.compile(model, mesh, inputs, plan=plan)
    held = dict(compiled.named_parameters())
    assert 0 < len(held) < len(list(plain.parameters()))
    for name, parameter in plain.named_parameters():
        assert name not in held or whole(held[name]).equal(parameter), name


def lazily_and_again(mesh: DeviceMesh) -> None:
    """At the first call of a model compiled without inputs; another batch size and evaluation keep the weights."""
    compiled = galvatron_fx.compile(model_of(seed=dist.get_rank()), mesh, plan=uniform("zero", mesh))
    plain = model_of(seed=0)
    with one_warning("in 11 of 11"):
        loss = compiled.forward_backward(**batch())["loss"]
    torch.testing.assert_close(loss, plain(**batch())["loss"].detach(), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        got, expected = (m(**batch(1, rows=12))["loss"] for m in (compiled.eval(), plain.eval()))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def only_first_has_weights(mesh: DeviceMesh) -> None:
    """Ranks that build on the meta device get what rank 0 has loaded."""
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = model_of()
    with one_warning("in 11 of 11"):
        compiled = galvatron_fx.compile(model, mesh, batch(), plan=uniform("zero", mesh))
    trains_as(compiled, model_of())


def changed_after_compile(mesh: DeviceMesh) -> None:
    """Weights and buffers that some ranks change, or load, between compile and the first call; equal ones are fine."""
    for name, role in (("head.weight", "data"), ("layers.0.up.bias", "zero"), ("offset", "tensor")):
        compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform(role, mesh))
        tensors = dict(compiled.named_parameters()) | dict(compiled.named_buffers())
        with torch.no_grad():
            local = tensors[name].to_local() if isinstance(tensors[name], DTensor) else tensors[name]
            local.add_(dist.get_rank())
        if role == "zero":  # each rank holds its own part
            compiled.forward_backward(**batch())
            continue
        with refused(InputError, f"rank 1 holds other values of '{name}' than rank 0 at the first call"):
            compiled.forward_backward(**batch())


def changed_later(mesh: DeviceMesh) -> None:
    """What one rank alone changes in the middle of training; rounding is no difference, a count is one."""
    odd = dist.get_rank() == 1
    for name, change in (("head.weight", 0.1), ("offset", 0.1), ("seen", 1)):
        model = model_of()
        model.register_buffer("seen", torch.tensor(1000))
        compiled = galvatron_fx.compile(model, mesh, batch(), plan=uniform("data", mesh), compare_batches=5)
        tensors = dict(compiled.named_parameters()) | dict(compiled.named_buffers())
        held = {n: (t.to_local() if isinstance(t, DTensor) else t).detach() for n, t in tensors.items()}
        for _ in range(4):
            compiled.forward_backward(**batch())
            held["offset"].mul_(1 + 1e-12 * odd)
        held[name].add_(change * odd)
        with refused(InputError, f"rank 1 holds other values of '{name}' than rank 0 in call 5 .* same state"):
            compiled.forward_backward(**batch())


class Linears(nn.Module):
    """For the meta device: all its modules have an initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 12, dtype=torch.float64), nn.Linear(12, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.head(self.up(x).relu()) * scale, labels)}


class Constant(Linears):
    """A tensor that is no buffer and differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(CLASSES, dtype=torch.float64) + dist.get_rank()

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.head(self.up(x).relu()) * scale + self.table, labels)}


# ---- flags and options ----


def unlike_options(mesh: DeviceMesh) -> None:
    """What differs is named, on all ranks, before anything is traced."""
    odd = dist.get_rank() == 1
    with torch.device("meta"):
        meta = Linears()
    frozen, mode = model_of(), model_of()
    frozen.head.bias.requires_grad_(not odd)
    mode.layers[1].train(not odd)
    wider = model_of()
    wider.register_buffer("more", torch.zeros(2 + odd))
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        (r"another seed than rank 0 \(1, and 0\)", meta, {"seed": int(odd)}),
        (r"another requires_grad than rank 0 \(head\.bias: False, and head\.bias: True\)", frozen, {}),
        (r"another mode than rank 0 \(layers\.1: eval, and layers\.1: train\)", mode, {}),
        (r"another parameter or buffer than rank 0 \(more \(3,\)", wider, {}),
        (
            r"another backend than rank 0 \(inductor, and eager\)",
            model_of(),
            {"backend": "inductor" if odd else "eager"},
        ),
        (r"another search_seconds than rank 0 \(5, and None\)", model_of(), {"search_seconds": 5 if odd else None}),
        (r"another optimizer than rank 0 \('adamw', and 'sgd'\)", model_of(), {"optimizer": "adamw" if odd else "sgd"}),
        (r"another memory_budget than rank 0", model_of(), {"memory_budget": "1GB" if odd else "2GB"}),
        (r"another constant tensor than rank 0 \(.*\(5,\)", Constant(), {"plan": uniform("data", mesh)}),
    ]
    for message, model, options in cases:
        with refused(PlanError, message):
            galvatron_fx.compile(model, mesh, batch(), **options)


# ---- meshes ----


def part_of_the_ranks(mesh: DeviceMesh) -> None:
    half = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "tp"))["dp"]
    for use in (
        lambda: galvatron_fx.compile(model_of(), half, batch()),
        lambda: galvatron_fx.compile(model_of(), half),
        lambda: galvatron_fx.measure_cluster(half, seconds=1),
    ):
        with refused(InputError, r"the mesh has the ranks \[\d, \d\], 2 of 4: pass the mesh over all ranks"):
            use()


# ---- batches ----


def by_rank(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    """What a DistributedSampler hands out: as many rows as others, of its own."""
    return batch(10 * seed + dist.get_rank(), rows)


def joined(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    """The global batch of all ranks' rows, in their order."""
    parts = [batch(10 * seed + rank, rows) for rank in range(dist.get_world_size())]
    return {name: torch.cat([p[name] for p in parts]) if parts[0][name].dim() else parts[0][name] for name in parts[0]}


def other_rows(role: str, mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform(role, mesh))
    remedies = r"'labels' than rank 0 in call 1 .*pass the global batch.*DistributedSampler.*batch='local'"
    with refused(InputError, r"ranks \[1\] hold other values of " + remedies):
        compiled.forward_backward(**by_rank(0))
    assert all(parameter.grad is None for parameter in compiled.parameters())
    with torch.no_grad(), refused(InputError, "'labels' than rank 0 in call 2"):
        compiled.eval()(**{**batch(), "labels": by_rank(0)["labels"]})


def other_rows_later(mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform("tensor", mesh), compare_batches=5)
    for call in range(1, 5):
        compiled.forward_backward(**(batch() if call < 4 else by_rank(0)))
    with refused(InputError, "in call 5"):
        compiled.forward_backward(**by_rank(0))
    never = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform("tensor", mesh), compare_batches=0)
    never.forward_backward(**by_rank(0))


def other_rows_as_own(mesh: DeviceMesh) -> None:
    """Ranks own unlike rows under ``data``, the same ones under ``tensor``; what has no batch dim is the same."""
    for role in ("data", "tensor"):
        compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform(role, mesh))
        local = by_rank(0, rows=len(compiled.batch_rows))
        if role == "data":
            compiled.forward_backward(**own_rows(local))
            unlike = {**local, "scale": local["scale"] + dist.get_rank()}
            with refused(InputError, "'scale' than rank 0"):
                compiled.forward_backward(**own_rows(unlike))
        else:
            with refused(InputError, "'labels' than rank 0 in call 1"):
                compiled.forward_backward(**own_rows(local))


def unlike_partners(mesh: DeviceMesh) -> None:
    """Ranks 0 and 1 compute the same half of the batch, 2 and 3 the other."""
    grid = init_device_mesh("cpu", (2, 2))
    compiled = galvatron_fx.compile(model_of(), grid, batch(), plan=Plan.uniform((2, 2), ("data", "tensor")))
    whole_batch = batch()
    local = {n: v[list(compiled.batch_rows)] if v.dim() else v for n, v in whole_batch.items()}
    same(compiled.forward_backward(**own_rows(local))["loss"], model_of()(**whole_batch)["loss"], "loss")
    local["x"] = local["x"] + (dist.get_rank() == 3)
    with refused(InputError, r"ranks \[3\] hold other values of 'x' than rank 2 in call 2 .*compute the same rows"):
        compiled.forward_backward(**own_rows(local))


# ---- local batches ----


def local_batches(roles: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Steps on each rank's own rows, with unlike counts of labels, are those of one device on the joined batch."""
    shape = (mesh.size(),) if len(roles) == 1 else (2, 2)
    parts = 4 if "pipeline" in roles else 2 if "zero" in roles else 1
    pipelining = Pipelining(2 if "pipeline" in roles else 1, parts, "1f1b") if parts > 1 else Pipelining()
    model, inputs = zoo.llama(layers=2 if "pipeline" in roles else 1)
    plain = copy.deepcopy(model)
    ranks, rank, rows = mesh.size(), dist.get_rank(), 4

    def every(seed: int, rows: int) -> list[dict[str, Tensor]]:
        return [text(inputs, ranks * seed + of, rows, counted=of + 3) for of in range(ranks)]

    plan = Plan.uniform(shape, roles, pipelining=pipelining)
    compiled = galvatron_fx.compile(
        model, init_device_mesh("cpu", shape), every(0, rows)[rank], plan=plan, batch="local"
    )
    assert compiled.batch_rows == tuple(range(rank * rows, (rank + 1) * rows))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    for step in range(2):
        own = every(step, rows)[rank]
        whole_batch = {name: torch.cat([b[name] for b in every(step, rows)]) for name in own}
        got, expected = compiled.forward_backward(**own), plain(**whole_batch)
        expected.loss.backward()
        same(got.loss, expected.loss, f"loss of step {step}")
        if parts == 1:
            same(got.logits, expected.logits, f"logits of step {step}")  # of the global batch, in the order of ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(compiled, plain, f"step {step}")


def text(like: dict[str, Tensor], seed: int, rows: int, counted: int) -> dict[str, Tensor]:
    """Token ids, of which ``counted`` in a row are labels."""
    shape = rows, like["input_ids"].shape[1]
    ids = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, counted:] = -100
    return {**{name: torch.ones(shape, dtype=value.dtype) for name, value in like.items()}, "input_ids": ids,
            "labels": labels}  # fmt: skip


def local_without_inputs(mesh: DeviceMesh) -> None:
    """Compiled at the first call; gradients by backward(), evaluation on more rows, an input without a batch dim."""
    compiled = galvatron_fx.compile(model_of(), mesh, plan=uniform("data", mesh), batch="local")
    plain = model_of()
    loss = compiled(**by_rank(0))["loss"]
    loss.backward()
    expected = plain(**joined(0))["loss"]
    expected.backward()
    same(loss, expected, "loss")
    same(compiled.head.weight.grad, plain.head.weight.grad, "gradient")
    with torch.no_grad():
        got, expected = compiled.eval()(**by_rank(1, 2 * ROWS)), plain.eval()(**joined(1, 2 * ROWS))
    same(got["loss"], expected["loss"], "loss of evaluation")
    rank = dist.get_rank()
    same(got["logits"], expected["logits"], "logits of the global batch")
    unlike = {**by_rank(1), "scale": torch.tensor(1.0 + rank, dtype=torch.float64)}
    with refused(InputError, "'scale' than rank 0 .* it has no batch dim"):
        compiled(**unlike)


def local_refusals(mesh: DeviceMesh) -> None:
    odd = dist.get_rank() == 1
    plan = uniform("data", mesh)
    with refused(PlanError, r"ranks \[1\] hold another batch than rank 0 \(.*x \(5, 6\).*x \(4, 6\)"):
        galvatron_fx.compile(model_of(), mesh, batch(rows=5 if odd else 4), plan=plan, batch="local")
    with refused(PlanError, r"another batch= than rank 0 \(local, and global\)"):
        galvatron_fx.compile(model_of(), mesh, batch(), plan=plan, batch="local" if odd else "global")
    with refused(InputError, "batch is 'own': use 'global' or 'local'"):
        galvatron_fx.compile(model_of(), mesh, batch(), plan=plan, batch="own")
    compiled = galvatron_fx.compile(model_of(), mesh, by_rank(0), plan=plan, batch="local")
    with refused(InputError, r"ranks \[1\] bring another batch than rank 0 in call 1 .*x \(5, 6\) float64"):
        compiled.forward_backward(**by_rank(0, rows=5 if odd else 8))
    with refused(InputError, r"unlike numbers of rows \(labels 8, x 5\)"):
        compiled.forward_backward(**{**by_rank(0), "x": by_rank(0, rows=5)["x"]})
    with refused(InputError, "own_rows: .*each rank's own batch already"):
        compiled.forward_backward(**own_rows(by_rank(0)))
    loss = compiled.forward_backward(**by_rank(0))["loss"]
    same(loss, model_of()(**joined(0))["loss"], "loss after refusals")


@dataclass(frozen=True)
class SpellOutGradientOfRelu:
    """``threshold_backward(dy, y, 0)`` -> ``where(y <= 0, 0, dy)``, in a layer's own block."""

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for node in graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
            gradient, kept, _ = node.args
            like = meta_of(node)
            with graph.graph.inserting_before(node):
                sign = graph.graph.call_function(aten.le.Scalar, (kept, 0))
                set_meta(sign, like.having(specs=(replace(like.spec, dtype=torch.bool),)))
                zero = graph.graph.call_function(aten.zeros_like.default, (gradient,))
                set_meta(zero, like)
            node.target, node.args = aten.where.self, (sign, zero, gradient)
        return graph


def passes_of_the_users(mesh: DeviceMesh) -> None:
    """An inserted pass runs on every rank, exactly; one on some ranks alone is refused."""
    passes = {"Decompose": SpellOutGradientOfRelu()}
    for role in ("zero", "tensor"):
        compiled = galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform(role, mesh), passes=passes)
        assert "SpellOutGradientOfRelu" in compiled.pass_table()
        assert "aten.threshold_backward" not in compiled.print_readable(print_output=False)
        assert " flops, " in compiled.print_readable(print_output=False, costs=True)
        trains_as(compiled, model_of())
    with refused(PlanError, r"another passes than rank 0 .*SpellOutGradientOfRelu\(\) behind Decompose"):
        mine = passes if dist.get_rank() == 0 else None
        galvatron_fx.compile(model_of(), mesh, batch(), plan=uniform("zero", mesh), passes=mine)


WEIGHTS: dict[str, Check] = {
    **{f"another_seed_{role}": partial(another_seed, role) for role in ("data", "zero", "tensor")},
    "another_buffer": another_buffer,
    "swapped_values": swapped_values,
    "same_weights": same_weights_are_not_sent,
    "staged": staged,
    "lazily_and_again": lazily_and_again,
    "changed_after_compile": changed_after_compile,
    "changed_later": changed_later,
    "only_first_has_weights": only_first_has_weights,
    "unlike_options": unlike_options,
    "passes_of_the_users": passes_of_the_users,
}
BATCHES: dict[str, Check] = {
    **{f"other_rows_{role}": partial(other_rows, role) for role in ("data", "tensor")},
    "other_rows_later": other_rows_later,
    "other_rows_as_own": other_rows_as_own,
    **{f"local_{role}": partial(local_batches, (role,)) for role in ("data", "zero", "tensor", "sequence", "pipeline")},
    "local_without_inputs": local_without_inputs,
    "local_refusals": local_refusals,
}
ON_FOUR: dict[str, Check] = {
    "part_of_the_ranks": part_of_the_ranks,
    "unlike_partners": unlike_partners,
    "local_data_tensor": partial(local_batches, ("data", "tensor")),
    "local_pipeline_zero": partial(local_batches, ("pipeline", "zero")),
}
CHECKS: dict[int, dict[str, Check]] = {2: WEIGHTS | BATCHES, 4: ON_FOUR}


def main() -> None:
    """Run the checks of every number of ranks, or those named."""
    for ranks in CHECKS:
        prepare = partial(galvatron_fx.capture, *zoo.llama(layers=1))
        fork_checks((ranks,), CHECKS[ranks], sys.argv[1:], prepare)


if __name__ == "__main__":
    main()

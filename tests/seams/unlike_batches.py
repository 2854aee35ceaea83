"""Ranks that come with unlike batches, and with rows of their own."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Pipelining, Plan, own_rows
from galvatron_fx.errors import CaptureError, InputError, PlanError
from tests.models import zoo
from tests.passes.frontend.test_follow_batch import Hidden, Words
from tests.passes.frontend.test_follow_batch import batch as pictures
from tests.runtime.beside_plain import same, same_parameters
from tests.seams import test_input_reads
from tests.seams.unlike_model import ROWS, batch, model_of, refused, uniform


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


def other_values_decide(mesh: DeviceMesh) -> None:
    """All ranks come with values by which forward decides otherwise, which makes another program; or one of them."""
    plain = test_input_reads.model()
    plan = uniform("tensor", mesh)
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, test_input_reads.inputs(), plan=plan)
    first, other = test_input_reads.inputs(), test_input_reads.inputs(((2, 2), (2, 1), (1, 3), (3, 1)))
    for each in (other, first):
        loss = compiled.forward_backward(**each)
        expected = plain(**each)
        expected.backward()
        same(loss, expected.detach(), "loss")
    for name, parameter in plain.named_parameters():
        same(compiled.get_parameter(name).grad, parameter.grad, f"gradient of {name}")
    unlike = test_input_reads.inputs(((3, 1), (1, 3), (2, 2), (2, 1))) if dist.get_rank() == 1 else other
    with refused(InputError, r"ranks \[1\] bring another batch .*, and .*sizes .*values by which program 2 decides"):
        compiled.forward_backward(**unlike)
    same(compiled.forward_backward(**other), plain(**other).detach(), "loss behind a refusal")


def batches_put_together(mesh: DeviceMesh) -> None:
    """Each rank's loader gives pictures of its own sizes to a model that decides by them."""
    torch.manual_seed(0)
    rank, plain = dist.get_rank(), Words().double()
    ids, patches, sizes = pictures()
    firsts = int(sizes[:1].sum())
    own = {"ids": ids[:1], "patches": patches[:firsts], "sizes": sizes[:1]}
    if rank:
        own = {"ids": ids[1:], "patches": patches[firsts:], "sizes": sizes[1:]}
    with refused(CaptureError, "no rank has the values of all samples: .*galvatron={'batch': 'gather'}"):
        galvatron_fx.compile(plain, mesh, {"ids": ids[:2], "patches": patches[:3], "sizes": sizes[:2]}, batch="local")
    whole = galvatron_fx.gather_batch(own, mesh)
    for name, expected in (("ids", ids), ("patches", patches), ("sizes", sizes)):
        same(whole[name], expected, name)
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, own, plan=uniform("zero", mesh), batch="gather")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
    for _ in range(2):
        expected = plain(**whole)
        expected.backward()
        same(compiled.forward_backward(**own), expected.detach(), "loss")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(compiled, plain, "parameters")
    second = galvatron_fx.gather_batch({"x": ids[None, rank : rank + 1], "n": 2}, mesh, dims={"x": 1})
    same(second["x"], ids[None, : mesh.size()], "rows behind")
    for unlike, dims, match in (
        ({**own, "ids": ids[:, rank:]}, {}, "rank 1 brings 'ids' as .rows, 5. of torch.int64, and rank 0 as .rows, 6."),
        ({**own, "n": rank}, {}, "rank 1 brings 'n' as 1, and rank 0 as 0"),
        (own, {"id": 1} if rank else {}, "rank 1: dims names 'id', which is not in the batch: there are ids"),
        ({**own, "x": patches.clone().requires_grad_(bool(rank))}, {}, "rank 1: 'x' needs a gradient"),
        ({**own, "y" if rank else "x": ids}, {}, "rank 1 brings ids, patches, sizes, y, and rank 0 ids, .*, x"),
        ({**own, "n": "a" * 100 + str(rank)}, {}, "rank 1 brings 'n' as 'a*1', and rank 0 as 'a*0'"),
        ({**own, "n": ids.numpy()}, {}, "rank 0: 'n' is a ndarray: give a tensor"),
        ({"n": 1}, {}, "rank 0: there is no tensor with rows to put together"),
    ):
        with refused(InputError, match):
            galvatron_fx.gather_batch(unlike, mesh, dims)
    with refused(InputError, "of all 2 ranks are put together, and the mesh has 1"):
        galvatron_fx.gather_batch(own, DeviceMesh("cpu", [0], _init_backend=False, _rank=0))
    with refused(PlanError, r"ranks \[1\] hold another batch= than rank 0 \((local, and gather|gather, and local)\)"):
        galvatron_fx.compile(plain, mesh, own, batch="local" if rank else "gather")
    with refused(InputError, r"takes each rank's own batch already \(batch='gather'\)"):
        compiled.forward_backward(**own_rows(own))
    with refused(InputError, "batch='gather' and a loss outside of the model"):
        galvatron_fx.compile(Hidden().double(), mesh, own, plan=uniform("data", mesh), batch="gather")(**own)


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


def local_plan(roles: tuple[str, ...]) -> Plan:
    """With micro-batches under some roles."""
    parts = 4 if "pipeline" in roles else 2 if "zero" in roles else 1
    pipelining = Pipelining(2 if "pipeline" in roles else 1, parts, "1f1b") if parts > 1 else Pipelining()
    return Plan.uniform((2,) * len(roles), roles, pipelining=pipelining)


def local_batches(roles: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Steps on each rank's own rows, with unlike counts of labels, are those of one device on the joined batch."""
    plan = local_plan(roles)
    model, inputs = zoo.llama(layers=1)
    plain = copy.deepcopy(model)
    ranks, rank, rows = mesh.size(), dist.get_rank(), 4

    def every(seed: int, rows: int) -> list[dict[str, Tensor]]:
        return [text(inputs, ranks * seed + of, rows, counted=of + 3) for of in range(ranks)]

    grid = init_device_mesh("cpu", plan.axis_sizes)
    compiled = galvatron_fx.compile(model, grid, every(0, rows)[rank], plan=plan, batch="local")
    assert compiled.batch_rows == tuple(range(rank * rows, (rank + 1) * rows))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    for step in range(2):
        own = every(step, rows)[rank]
        whole_batch = {name: torch.cat([b[name] for b in every(step, rows)]) for name in own}
        got, expected = compiled.forward_backward(**own), plain(**whole_batch)
        expected.loss.backward()
        same(got.loss, expected.loss, f"loss of step {step}")
        if plan.pipelining.is_trivial:
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
    with refused(InputError, "batch is 'own': use one of global, local, gather"):
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

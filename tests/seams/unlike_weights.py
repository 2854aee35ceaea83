"""Ranks that come with unlike weights, or change them."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from tests.models import zoo
from tests.seams.unlike_model import batch, model_of, one_warning, refused, trains_as, uniform, whole


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

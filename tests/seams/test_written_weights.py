"""Forwards that write into parameters that they train: weights that are normed or clipped in place (EDM2, Gemma 3n)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.helpers import assert_exact

WIDTH, WORDS = 8, 12
uniform = Plan.uniform


class Forced(nn.Linear):
    """Norms its weight in place in training, as EDM2 does, and clips its bias by way of ``.data``."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
            self.bias.data.clamp_(-0.2, 0.2)
        return F.linear(x, self.weight * 2, self.bias)


class Net(nn.Module):
    """Equal layers with such a one, and a head that is tied to the embedding and norms it for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), Forced(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), Forced(WIDTH, WIDTH)) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randint(WORDS, (4, 6), generator=generator) for name in ("ids", "labels")}


PLANS = {
    **{role: uniform((2,), (role,)) for role in ("data", "zero", "tensor", "sequence", "tensor_sequence")},
    "recomputed": uniform((2,), ("zero",), recompute=True),
    "micro-batches": uniform((2,), ("zero",), pipelining=Pipelining(1, 2)),
    "stages": uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_trains_as_one_device(plan: Plan) -> None:
    found = galvatron_fx.check(net(), (2,), batch(), plan, steps=3)
    assert found.ok and found.is_exact, str(found)


def by_backward(model: DistributedGraphModule, _: torch.optim.Optimizer) -> None:
    model(**batch()).backward()


def folded(model: DistributedGraphModule, optimizer: torch.optim.Optimizer) -> None:
    """What forward writes may not undo an update that was made in backward."""
    if not model.plan.fold_gradients:
        return by_backward(model, optimizer)
    if model._folded is None:
        model.fold_gradients(optimizer)
    model.forward_backward(**batch())
    return None


@pytest.mark.parametrize(("step", "folds"), [(by_backward, False), (folded, True)])
def test_a_compiled_model_writes_as_eager(mesh: DeviceMesh, step: Callable[..., None], folds: bool) -> None:
    model = galvatron_fx.compile(net(), mesh, batch(), plan=uniform((1,), ("data",), fold_gradients=folds))
    plain = net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain)]
    for _ in range(3):
        step(model, optimizers[0])
        plain(**batch()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert_exact({"loss": model.eval()(**batch())}, {"loss": plain.eval()(**batch())})
    held = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert_exact(held, {name: parameter.detach() for name, parameter in plain.named_parameters()})


def test_weights_of_mixed_precision_are_not_rounded() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match=r"forward changes 'embed.weight'.* loses small changes"):
        galvatron_fx.capture(net().float(), batch(), mixed_precision=policy)

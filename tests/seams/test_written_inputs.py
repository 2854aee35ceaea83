"""Forwards that write into their inputs in place, as eager PyTorch lets them: a compiled model does so in copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.helpers import assert_exact, one_device, simulate, uniform

WIDTH, WORDS = 8, 12
WRITES = pytest.mark.filterwarnings("ignore:forward writes into")


class Writer(nn.Module):
    """Writes into all that it is given, in views and with what needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.place, self.token = nn.Parameter(torch.randn(6, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, ids: Tensor, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids.add_(1))
        features += self.place
        features[labels == 0] = self.token
        features[:, 1:3] *= 0.5
        labels[labels == 0] = -100
        x = x + features.tanh()
        for layer in self.layers:
            x = x + layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss, "labels": labels, "ids": ids}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "ids": torch.randint(WORDS - 1, (4, 6), generator=generator),
        "features": torch.randn(4, 6, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (4, 6), generator=generator),
    }


def writer() -> Writer:
    torch.manual_seed(0)
    return Writer().double()


@pytest.mark.parametrize("role", ["data", "zero", "tensor", "sequence"])
@WRITES
def test_every_role_computes_as_one_device(role: str) -> None:
    model = writer()
    graph = galvatron_fx.capture(model, inputs())
    assert_exact(simulate(graph, model, inputs(), (2,), uniform(graph, role), {}), one_device(model, inputs()))


@pytest.mark.parametrize("pipelining", [Pipelining(1, 2), Pipelining(2, 2)])
@WRITES
def test_micro_batches_and_stages(pipelining: Pipelining) -> None:
    role = "pipeline" if pipelining.num_stages > 1 else "data"
    assert galvatron_fx.check(writer(), (2,), inputs(), Plan.uniform((2,), (role,), pipelining=pipelining), steps=2)


def test_what_the_caller_gave_stays_as_it_was(mesh: DeviceMesh) -> None:
    given: dict[str, Any] = inputs()
    with pytest.warns(UserWarning, match="writes into 'features', 'ids', 'labels' in place: .* stays as it was"):
        compiled = galvatron_fx.compile(writer(), mesh, given, plan=Plan.uniform((1,), ("data",)))
    returned = compiled.forward_backward(**given)
    torch.testing.assert_close(given, inputs(), rtol=0, atol=0)
    torch.testing.assert_close(returned["ids"], given["ids"] + 1)


@WRITES
def test_inputs_in_one_memory_are_refused(mesh: DeviceMesh) -> None:
    """Eager would see in one what is written into the other."""
    given = inputs()
    compiled = galvatron_fx.compile(writer(), mesh, given, plan=Plan.uniform((1,), ("data",)))
    both = torch.randint(3, (4, 7), generator=torch.Generator().manual_seed(3))
    for labels in (both[:, :-1], both[:, 1:]):  # as windows of one text
        given |= {"ids": both[:, :-1], "labels": labels}
        with pytest.raises(InputError, match=r"writes into input 'ids' in place, and inputs 'ids', 'labels' share"):
            compiled.forward_backward(**given)
    with pytest.raises(InputError, match=r"pass ids.clone\(\)"):
        galvatron_fx.capture(writer(), given)

"""The model and batch of ranks that differ, and what must come of them: steps as on one device, warnings, errors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from galvatron_fx import Plan

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
    warned = [str(w.message) for w in seen if "rank 0" in str(w.message)]
    assert len(warned) == (dist.get_rank() == 0), warned
    assert all(re.search(message, text) for text in warned), warned


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """The block raises on this rank."""
    try:
        yield
    except kind as error:
        assert re.search(message, str(error)), error
    else:
        raise AssertionError(f"let go, instead of: {message}")

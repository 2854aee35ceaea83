"""What a forward does to attributes of its modules: carried on, dropped with a warning, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.errors import CaptureError, PlanError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.frontend.capture.capture import Capture
from passes.frontend.capture.module_state import ModuleState, as_buffers
from tests.helpers import assert_exact, captured, simulate, simulate_stages, uniform

BATCH, WIDTH = 4, 6


class Trained(nn.Module):
    """Two layers and a loss; ``middle`` is the case."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def middle(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh()).pow(2).mean()


class Mean(nn.Module):
    """A buffer that forward assigns, and that a later step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        out = h - self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return out


class AssignedBuffer(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Mean()

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


class CountingBuffer(Trained):
    """A counter as it should be written, used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def middle(self, h: Tensor) -> Tensor:
        self.step += 1
        return h * 0.5**self.step


class SavedBuffer(Trained):
    """The old value of an assigned buffer is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def middle(self, h: Tensor) -> Tensor:
        out = h * self.scale
        self.scale = self.scale * 1.5
        return out


class AssignedAttribute(Trained):
    """A plain tensor that forward assigns and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1
        return h - self.mean


class WrittenAttribute(Trained):
    """A plain tensor that forward writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1)
        return h - self.mean


class CachedMask(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.tables: dict[Any, Tensor] = {}
        self.longest = 0

    def middle(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        if self.mask is None or self.mask.size(0) < n:
            self.mask = torch.ones(n, n, dtype=h.dtype, device=h.device).tril()
        if n > self.longest:
            self.tables["cos"] = torch.arange(n, dtype=h.dtype).cos()
            self.longest = n
        return h @ self.mask + self.tables["cos"]


class Stored(Trained):
    def middle(self, h: Tensor) -> Tensor:
        self.aux_loss = h.pow(2).mean()
        self.seen = [h]
        return h + self.aux_loss


class Counter(Trained):
    """A counter that nothing depends on."""

    calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


class Momentum(Trained):
    """A second layer that follows the first, as in MoCo."""

    def __init__(self, how: str = "no_grad") -> None:
        super().__init__()
        self.follower = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.how = how

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.first.parameters(), self.follower.parameters(), strict=True):
            if self.how == "data":
                k.data = k.data * 0.9 + q.data * 0.1
            else:
                k.mul_(0.9).add_(q, alpha=0.1)

    def middle(self, h: Tensor) -> Tensor:
        self.follow()
        with torch.no_grad():
            key = self.follower(h)
        return h * key


class Recurrent(Trained):
    """torch's own recurrent layers list their weights again in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        return self.cells(h[:, None])[0][:, 0]


EXACT = {
    "assigned buffer": AssignedBuffer,
    "counting buffer": CountingBuffer,
    "saved buffer": SavedBuffer,
    "assigned attribute": AssignedAttribute,
    "written attribute": WrittenAttribute,
    "cached mask": CachedMask,
    "stored": Stored,
    "counter": Counter,
    "momentum": Momentum,
    "recurrent": Recurrent,
    "momentum by data": lambda: Momentum("data"),
}


def made(case: Any) -> nn.Module:
    torch.manual_seed(0)
    return case().double().apply(_doubled)


def _doubled(module: nn.Module) -> None:
    for name, value in list(module.__dict__.items()):
        if isinstance(value, Tensor):
            module.__dict__[name] = value.double()


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator),) for _ in range(3)]


def train(model: nn.Module, step: Any) -> dict[str, Tensor]:
    """Three steps of SGD with what ``step`` returns: gradients, and new values of what forward changes."""
    seen: dict[str, Tensor] = {}
    for number, inputs in enumerate(batches()):
        values = step(inputs)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for key, value in values.items():
                kind, name = key.split()
                if kind == "buffer":
                    tensors[name].copy_(value)
            for key, value in values.items():
                kind, name = key.split()
                if kind == "grad":
                    tensors[name].sub_(value, alpha=0.1)
                seen[f"output {number} {kind} {name}"] = value
    return seen


def eager(model: nn.Module) -> dict[str, Tensor]:
    """What three eager steps leave: losses, parameters, buffers and plain tensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs in batches():
        optimizer.zero_grad()
        losses.append(model(*inputs))
        losses[-1].backward()
        optimizer.step()
    return {f"output {i}": loss.detach() for i, loss in enumerate(losses)} | left(model)


def left(model: nn.Module) -> dict[str, Tensor]:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def compiled(model: nn.Module, roles: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """The same from the graph of one capture, on simulated ranks."""
    graph = captured(model, batches()[0])
    names = [port.name for port in signature(graph).inputs if port.kind == "buffer"]
    known = dict(model.named_buffers())
    cache: dict[Any, Any] = {}
    result = {}
    with as_buffers(model, [name for name in names if name not in known]):
        losses: list[Tensor] = []

        def step(inputs: Any) -> dict[str, Tensor]:
            values = simulate(graph, model, inputs, sizes, uniform(graph, *roles), cache)
            losses.append(values.pop("output 0"))
            return values

        train(model, step)
        result = {f"output {i}": loss for i, loss in enumerate(losses)} | left(model)
    return result


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("ignore:forward stores")
def test_state_is_that_of_eager(name: str) -> None:
    model = made(EXACT[name])
    other = copy.deepcopy(model)
    expected = eager(other)
    attributes = ModuleState(other).constants
    for roles, sizes in ((("data",), (2,)), (("zero", "tensor"), (2, 2))):
        trained = copy.deepcopy(model)
        before = ModuleState(trained)
        got = compiled(trained, roles, sizes)
        assert not before.changes(), "the user's model is as it was"
        for path in set(got) - set(expected):
            expected[path] = attributes[path].detach()
        assert_exact(got, expected, f"{name} {roles}")
    with torch.no_grad():
        trained(*batches()[0])


class AllBuffers(Trained):
    """Two buffers that change places, and one that follows the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.ones(WIDTH))
        self.register_buffer("before", torch.full((WIDTH,), 2.0))
        self.norm = Mean()

    def middle(self, h: Tensor) -> Tensor:
        self.now, self.before = self.before, self.now
        return self.norm(h * self.now)


def test_weights_that_follow_in_a_narrower_dtype_are_refused() -> None:
    """0.999 of a weight is the weight in bfloat16: it would never move."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with pytest.raises(CaptureError, match=r"'follower\.weight', 'follower\.bias', of torch\.float32, and under mixed"):
        galvatron_fx.capture(Momentum(), tuple(x.float() for x in batches()[0]), mixed_precision=policy)
    wide = MixedPrecisionPolicy(None, torch.float32)
    galvatron_fx.capture(Momentum(), tuple(x.float() for x in batches()[0]), mixed_precision=wide)


@pytest.mark.parametrize("make", [AllBuffers, Momentum, CountingBuffer])
def test_state_under_micro_batches(make: Any) -> None:
    model = made(make)
    inputs = batches()[0]
    graph = captured(model, inputs)
    other = copy.deepcopy(model)
    loss = other(*inputs)
    loss.backward()
    buffers = {f"buffer {name}": buffer for name, buffer in other.named_buffers()}
    got = simulate_stages(graph, model, inputs, (1,), uniform(graph, "data"), [0], make_schedule("1f1b", 1, 1, 2))
    assert_exact(got, {"output 0": loss.detach()} | buffers, make.__name__)


def test_a_buffer_of_all_samples_is_refused_in_several_stages() -> None:
    model = made(AssignedBuffer)
    graph = captured(model, batches()[0])
    strategies = [Strategy(("pipeline",))] * num_blocks(graph)
    table = make_schedule("1f1b", 2, 2, 2)
    with pytest.raises(PlanError, match=r"new value of 'norm\.mean'.*num_microbatches=1, or one stage"):
        simulate_stages(graph, model, batches()[0], (2,), strategies, [0, 1], table)


class PythonStep(Trained):
    """Python state in the loss."""

    step = 0

    def middle(self, h: Tensor) -> Tensor:
        self.step += 1
        return h * 0.5**self.step


class LateStep(Trained):
    """Python state that decides much later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.inner.calls += 1
        return h * 2 if self.inner.calls > 1000 else h


class FirstCall(Trained):
    """Initialisation at the first batch."""

    started = False

    def middle(self, h: Tensor) -> Tensor:
        if not self.started:
            self.started = True
            return h * 0
        return h


class CarriedState(Trained):
    """A state that the first step does not have."""

    state: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        self.state = h.detach() if self.state is None else 0.5 * self.state + h.detach()
        return h + self.state


class CachedNoise(Trained):
    noise: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        if self.noise is None:
            self.noise = torch.randn(WIDTH)
        return h + self.noise


class CachedWeight(Trained):
    """A cache that eager never makes again, though what it is made of is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def middle(self, h: Tensor) -> Tensor:
        if "w" not in self.cache:
            self.cache["w"] = self.first.weight.detach() * 2
        return h @ self.cache["w"]


class Growing(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        self.history.append(h.detach().mean())
        return h


class WrittenInList(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.means = [torch.zeros(WIDTH)]

    def middle(self, h: Tensor) -> Tensor:
        self.means[0].mul_(0.9)
        return h - self.means[0]


class NewParameter(Trained):
    def middle(self, h: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(WIDTH))
        return h * self.scale


REFUSED = {
    "python state": (PythonStep, r"depends on 'step', which forward itself changes \(.*register_buffer\('?name"),
    "late step": (LateStep, r"depends on 'inner\.calls', which forward itself changes \(0 before the first"),
    "first call": (FirstCall, r"depends on 'started', which forward itself changes"),
    "carried state": (CarriedState, r"reads 'state' as the forward before left it.*register a buffer"),
    "cached noise": (CachedNoise, r"reads 'noise' as the forward before left it"),
    "cached weight": (CachedWeight, r"reads 'cache\['w'\]' as the forward before left it"),
    "growing list": (Growing, r"puts more into 'history'"),
    "written in a list": (WrittenInList, r"writes into the tensor 'means\[0\]'.*register_buffer"),
    "new parameter": (NewParameter, r"makes or replaces the parameter 'scale': make it in __init__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_would_freeze_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    inputs = (torch.randn(BATCH, WIDTH),)
    before = ModuleState(model)
    with pytest.raises(CaptureError, match=message):
        Capture(symbolic=False).run(model, inputs)
    assert not before.changes()
    model(*inputs).backward()  # nothing of the trace is left on the model


def test_what_is_dropped_is_named() -> None:
    with pytest.warns(UserWarning, match=r"stores 'aux_loss', 'seen\[0\]' on the model and does not read it again"):
        Capture(symbolic=False).run(made(Stored), batches()[0])


class Everything(AllBuffers):
    """Buffers, attributes, caches, stored tensors and a follower at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = torch.zeros(WIDTH)
        self.mask: Tensor | None = None
        self.momentum = Momentum("data")

    def middle(self, h: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH, dtype=h.dtype).triu()
        self.seen = h
        self.ema.mul_(0.5).add_(h.detach().mean(0))
        return self.momentum.middle(super().middle(h) @ self.mask - self.ema)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:forward stores")
@pytest.mark.parametrize("whole_step", [True, False])
def test_a_compiled_model_carries_state(mesh: DeviceMesh, whole_step: bool) -> None:
    model = made(Everything)
    other = copy.deepcopy(model)
    for each in (model, other):
        each(*batches()[1])  # leaves tensors with a history, and moves the state
    before = ModuleState(model)
    trained = galvatron_fx.compile(model, mesh, batches()[0], plan=Plan.uniform((1,), ("data",)))
    assert not before.changes()
    expected = eager(other)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    got = {}
    for number, inputs in enumerate(batches()):
        optimizer.zero_grad()
        loss = trained.forward_backward(*inputs) if whole_step else trained(*inputs)
        if not whole_step:
            loss.backward()
        optimizer.step()
        got[f"output {number}"] = loss.detach()
    got |= {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in left(trained).items()}
    assert_exact(got, expected | {"ema": other.ema}, "compiled")
    assert set(trained.state_dict()) == set(model.state_dict())

"""State that forward changes outside of its modules: what was traced is every step, or it is refused by name."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.errors import CaptureError
from passes.frontend.capture.capture import Capture
from tests.helpers import assert_exact, captured, one_device, simulate, uniform

WIDTH = 8
STEP = 0
TABLES: dict[int, Tensor] = {}
NOISES: dict[int, Tensor] = {}
HISTORY: list[Tensor] = []
ARRAY = np.zeros(3)
MEAN = torch.zeros(WIDTH)
ELSEWHERE = types.SimpleNamespace(step=0)


class Probe(nn.Module):
    """A layer, and ``middle``, which does something outside."""

    calls = 0

    def __init__(self, middle: Callable[[Probe, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.middle = nn.Linear(WIDTH, WIDTH), middle
        self.array, self.drawn, self.shuffled = np.zeros(1), np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self, self.layer(x)).pow(2).mean()


def counted(model: Probe, h: Tensor) -> Tensor:
    global STEP
    STEP += 1
    return h * 0.5**STEP


def counted_till_late(model: Probe, h: Tensor) -> Tensor:
    global STEP
    STEP += 1
    return h * 2 if STEP > 1000 else h


def counted_for_nothing(model: Probe, h: Tensor) -> Tensor:
    global STEP
    STEP += 1
    return h


def counted_by_class(model: Probe, h: Tensor) -> Tensor:
    type(model).calls += 1
    return h * 0.5**model.calls


def counted_by_name_of_class(model: Probe, h: Tensor) -> Tensor:
    Probe.calls += 1
    return h * 0.5**Probe.calls


def counted_in_an_object(model: Probe, h: Tensor) -> Tensor:
    ELSEWHERE.step += 1
    return h * 0.5**ELSEWHERE.step


def counted_by_default(model: Probe, h: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006
    seen[0] += 1
    return h * 0.5 ** seen[0]


def counted_inside() -> Callable[[Probe, Tensor], Tensor]:
    step = 0

    def inner(model: Probe, h: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return h * 0.5**step

    return functools.wraps(inner)(lambda model, h: inner(model, h))


def grown(model: Probe, h: Tensor) -> Tensor:
    HISTORY.append(h.detach().mean())
    return h


def written(model: Probe, h: Tensor) -> Tensor:
    MEAN.mul_(0.9).add_(0.1)
    return h - MEAN


def counted_in_numpy(model: Probe, h: Tensor) -> Tensor:
    ARRAY[1] += 1
    return h * float(ARRAY[1])


def counted_in_own_numpy(model: Probe, h: Tensor) -> Tensor:
    model.array += 1
    return h * float(model.array[0])


def cached_noise(model: Probe, h: Tensor) -> Tensor:
    if WIDTH not in NOISES:
        NOISES[WIDTH] = torch.randn(WIDTH)
    return h + NOISES[WIDTH]


REFUSED = {
    counted: r"depends on 'tests\.seams\.test_outside_state\.STEP', which forward itself changes \(0 before",
    counted_till_late: r"depends on 'tests\.seams\.test_outside_state\.STEP'",
    counted_by_class: r"depends on 'Probe\.calls'",
    counted_by_name_of_class: r"depends on 'Probe\.calls'",
    counted_in_an_object: r"depends on 'tests\.seams\.test_outside_state\.ELSEWHERE\.step'",
    counted_by_default: r"depends on 'counted_by_default\.seen\[0\]'",
    counted_inside(): r"depends on 'counted_inside\.<locals>\.inner\.step'",
    grown: r"puts more into 'tests\.seams\.test_outside_state\.HISTORY'",
    written: r"writes into the tensor 'tests\.seams\.test_outside_state\.MEAN': keep it in a buffer",
    counted_in_numpy: r"depends on 'tests\.seams\.test_outside_state\.ARRAY'",
    counted_in_own_numpy: r"depends on 'array', which forward itself changes: .*register_buffer",
    cached_noise: r"reads 'tests\.seams\.test_outside_state\.NOISES\[8\]' as the forward before left it",
}
DRAWN = {
    "random": lambda model, h: h * random.random(),
    "numpy.random": lambda model, h: h * np.random.rand(),
    "drawn": lambda model, h: h * model.drawn.random(),
    "shuffled": lambda model, h: h * model.shuffled.random(),
}
INPUTS = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("middle", REFUSED, ids=lambda middle: middle.__name__)
def test_what_a_trace_would_freeze_is_refused_by_name(middle: Any) -> None:
    def outside() -> Any:
        own = STEP, Probe.calls, ELSEWHERE.step, len(HISTORY), ARRAY.tolist(), MEAN.tolist(), len(NOISES)
        return own, counted_by_default.__defaults__

    before = copy.deepcopy(outside())
    with pytest.raises(CaptureError, match=REFUSED[middle]):
        Capture(symbolic=False).run(Probe(middle), INPUTS)
    assert outside() == before, "nothing of the trace is left"


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_of_others_are_refused(name: str) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CaptureError, match=rf"random numbers that it draws from '{name}'.*Draw them from torch"):
        Capture(symbolic=False).run(Probe(DRAWN[name]), INPUTS)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_what_decides_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match=r"stores 'tests\.seams\.test_outside_state\.STEP' .* does not read it again"):
        Capture(symbolic=False).run(Probe(counted_for_nothing), INPUTS)
    with pytest.warns(UserWarning, match="changes 'random' in every step, and the compiled model does not"):
        Capture(symbolic=False).run(Probe(lambda model, h: h if random.random() < 2 else -h), INPUTS)
    assert STEP == 0


class Named(OrderedDict[str, Any]):
    """A table that makes what is asked for, as those of transformers do."""

    def __getitem__(self, name: str) -> Any:
        kind, options = super().__getitem__(name)
        return kind(**options)


ACTIVATIONS = Named({"gelu": (nn.GELU, {"approximate": "tanh"}), "relu": (nn.ReLU, {})})


def test_tables_that_make_what_is_asked_for_stay_as_they_are() -> None:
    before = repr(list(OrderedDict.__iter__(ACTIVATIONS)))
    Capture(symbolic=False).run(Probe(lambda model, h: ACTIVATIONS["gelu"](h)), INPUTS)
    assert repr(list(ACTIVATIONS)) == before and isinstance(ACTIVATIONS["relu"], nn.ReLU)


REGISTRY: dict[type, str] = {}


class Positions(nn.Module):
    """A buffer, and a registry that the first call fills, as that of einops."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(WIDTH).float())

    def forward(self, h: Tensor) -> Tensor:
        REGISTRY.setdefault(type(h), "torch")
        return h * self.angles.cos()


def test_a_module_of_several_names_is_one() -> None:
    """Buffers are those that they were, whichever of their names a trace or a comparison takes."""
    REGISTRY.clear()
    model, inputs = Probe(lambda probe, h: probe.later(probe.first(h))), (INPUTS[0].double(),)
    model.first = model.later = Positions()
    model.double()
    graph = captured(model, inputs)
    expected = one_device(copy.deepcopy(model), inputs)
    assert_exact(simulate(graph, model, inputs, [2], uniform(graph, "data"), {}), expected)


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64).cos()


def cached(model: Probe, h: Tensor) -> Tensor:
    if h.shape[1] not in TABLES:
        TABLES[h.shape[1]] = torch.arange(h.shape[1], dtype=h.dtype)
    return h * table(h.shape[1]) + TABLES[h.shape[1]]


@pytest.mark.parametrize("is_warm", [False, True])
def test_caches_of_constants_are_made_anew(is_warm: bool) -> None:
    TABLES.clear()
    table.cache_clear()
    model, inputs = Probe(cached).double(), (INPUTS[0].double(),)
    expected = one_device(copy.deepcopy(model), inputs)
    if not is_warm:
        TABLES.clear()
        table.cache_clear()
    graph = captured(model, inputs)
    assert_exact(simulate(graph, model, inputs, [2], uniform(graph, "data"), {}), expected)
    assert len(TABLES) == table.cache_info().currsize == is_warm
    model(*inputs).backward()

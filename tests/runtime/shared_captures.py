"""One capture of each model for all ranks of a launch: made before the fork, and taken by every rank."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.runtime.decided_inputs import ValuesOfCall
from passes.frontend.capture.capture import ExampleInputs, FlatInputs
from passes.frontend.pipeline import Frontend

_capture = Frontend.run
_graphs: dict[bytes, fx.GraphModule] = {}


def share_captures() -> None:
    """From here on, this process and its forks capture a model for a batch once.

    The graph is one object: lowering reads it and changes its own copies. Captured each time are models that cannot be
    told from others, as those whose class is local to a function, and whatever a test's own passes take part in.
    """
    Frontend.run = _run  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def captured_once() -> Iterator[None]:
    """Models of the tests of a file that imports this are captured once."""
    run = Frontend.run
    share_captures()
    yield
    Frontend.run = run  # type: ignore[method-assign]


def _run(frontend: Frontend, model: nn.Module, example_inputs: ExampleInputs) -> fx.GraphModule:
    key = _key(frontend, model, FlatInputs.of(example_inputs))
    if key is None:
        return _capture(frontend, model, example_inputs)
    known = _graphs.get(key)
    if known is None or not ValuesOfCall(FlatInputs.of(example_inputs)).are_as(signature(known).decisions):
        _graphs[key] = _capture(frontend, model, example_inputs)
    return _graphs[key]


def _key(frontend: Frontend, model: nn.Module, inputs: FlatInputs) -> bytes | None:
    """Equal for equal models, shapes of inputs and options; None where that is not known."""
    if frontend.control.on_pass or frontend.control.inserted:
        return None
    stream = io.BytesIO()
    options = frontend.policy, frontend.batch_dim, frontend.forward_only, torch.get_default_dtype()
    faked = (*model.parameters(), *model.buffers(), *inputs.tensors)
    try:
        _Pickler(stream, faked).dump((options, model, inputs.leaves, str(inputs.tree)))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(stream.getvalue()).digest()


class _Pickler(pickle.Pickler):
    """Writes of tensors what a trace reads: no values of those that are ``faked``. Those that are tied stay so."""

    def __init__(self, stream: io.BytesIO, faked: Iterable[Tensor]) -> None:
        super().__init__(stream)
        self._faked = {id(tensor) for tensor in faked}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if id(obj) in self._faked or obj.is_meta:
            read: tuple[object, ...] = ()
        else:
            read = obj.device, obj.stride(), hashlib.sha256(obj.numpy(force=True).tobytes()).hexdigest()
        return str, (repr((type(obj), obj.shape, obj.dtype, obj.requires_grad, read)),)

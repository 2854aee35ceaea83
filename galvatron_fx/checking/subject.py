"""What is checked: a model and its batch, copied for everybody who trains it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.checking.wide_floats import NARROW, copied, moved
from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.materialize import whole_values
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["Subject", "same_generators"]


@dataclass(frozen=True)
class Subject:
    """``model`` and ``inputs`` are the user's and stay as they are; ``values``: of parameters and buffers, by name.

    ``mesh``: the real ranks, None for simulated ones.
    """

    model: nn.Module
    inputs: FlatInputs
    values: Mapping[str, Tensor]
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, model: nn.Module, inputs: FlatInputs, mesh: DeviceMesh | None, seed: int) -> Subject:
        """Take the weights that the model has, or has from ``seed``; on a mesh, those of rank 0.

        Raises InputError for a batch on the meta device.
        """
        empty = [n for n, t in zip(inputs.tensor_names, inputs.tensors, strict=True) if t.device.type == "meta"]
        if empty:
            raise InputError(f"{', '.join(empty)} of the batch is on the meta device: give a batch of real tensors")
        device = torch.device("cpu" if mesh is None else mesh.device_type)
        values = {name: value.to(device) for name, value in whole_values(model, seed).items()}
        if mesh is not None and dist.get_world_size() > 1:
            values = {name: value.contiguous().clone() for name, value in values.items()}
            for value in values.values():
                dist.broadcast(value, src=0)
        return cls(model, moved(inputs, lambda tensor: tensor.to(device)), values, mesh)

    @property
    def is_narrow(self) -> bool:
        """Whether parameters, buffers or inputs are narrower than float64."""
        return any(tensor.dtype in NARROW for tensor in (*self.values.values(), *self.inputs.tensors))

    def copy(self, change: Callable[[Tensor], Tensor]) -> tuple[nn.Module, FlatInputs]:
        """A copy of model and batch, of which every tensor is changed."""
        return copied(self.model, self.values, change), moved(self.inputs, change)


@contextmanager
def same_generators() -> Iterator[None]:
    """Leave torch's and Python's generators as they were."""
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)

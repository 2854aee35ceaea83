"""Measure the most tensor bytes alive at once, on any device, by watching every operator's results."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from galvatron_fx.ir.graph.host_copies import to_host


class TensorMemory(TorchDispatchMode):
    """Count the bytes of storages that are alive inside the ``with`` block; ``peak_bytes`` is the most of it.

    ``existing``: tensors that were made before (parameters, optimizer states) and count too. Of a DTensor the local
    part counts. Views share their storage, so they cost nothing; what a kernel allocates inside and frees again before
    it returns is not seen. What is copied to the host counts apart, in ``host_bytes`` and ``host_peak_bytes``, on CPUs
    as well, and so does what was ``on_host`` before. ``resizing``: also look for storages that are given another size,
    which takes long.
    """

    def __init__(
        self, existing: Iterable[Tensor] = (), *, on_host: Iterable[Tensor] = (), resizing: bool = False
    ) -> None:
        super().__init__()
        self._resizing = resizing
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        for there, tensors in ((False, existing), (True, on_host)):
            for tensor in tensors:
                self._hold(tensor.to_local() if isinstance(tensor, DTensor) else tensor, there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs the operator on local tensors, which come by here again
        if self._resizing:
            self._resize()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._hold(leaf, on_host=func is to_host)
        return result

    def _hold(self, tensor: Tensor, on_host: bool = False) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive and self._alive[key][0]() is storage:
            return
        size = storage.nbytes()
        if on_host:
            self._alive[key] = weakref.ref(storage, lambda dead: self._drop(key, dead, on_host)), size
            self.host_bytes += size
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
            return
        self._alive[key] = weakref.ref(storage, lambda dead: self._drop(key, dead)), size
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _resize(self) -> None:
        for key, (storage, size) in list(self._alive.items()):
            found = storage()
            if found is not None and found.nbytes() != size:
                self._alive[key] = storage, found.nbytes()
                self.bytes += found.nbytes() - size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _drop(self, key: int, dead: weakref.ref[Any], on_host: bool = False) -> None:
        if key in self._alive and self._alive[key][0] is dead:
            size = self._alive.pop(key)[1]
            self.bytes -= 0 if on_host else size
            self.host_bytes -= size if on_host else 0


def held_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers, gradients and optimizer states, as ``TensorMemory`` wants them to start from."""
    states = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [*module.parameters(), *module.buffers(), *gradients, *states]

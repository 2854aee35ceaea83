"""Parameters in the host's memory, and their gradients: they come to the device for updates, and go back.

Between steps a parameter is a tensor on the host, pinned where the device is a GPU; graphs copy what they take of it
(:mod:`passes.lowering.fetch_parameters`). On CPUs such a copy is another tensor, so that tests run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from galvatron_fx.ir.graph.host_copies import arrived, start_copy
from galvatron_fx.ir.torch_compat.dtensors import DTensor, dtensor_of, put_local
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = ["Visit", "device_of", "gradient_on_host", "is_on_host", "mark_like", "mark_on_host"]

_MARK = "lives_on_host"


def mark_on_host(model: nn.Module, names: Collection[str]) -> None:
    """Say of such parameters of ``model`` that they are on the host."""
    for name, parameter in model.named_parameters():
        if name in names:
            setattr(parameter, _MARK, True)


def mark_like(parameter: Tensor, other: Tensor) -> None:
    """Say of a parameter that it is on the host if another is."""
    if is_on_host(other):
        setattr(parameter, _MARK, True)


def is_on_host(parameter: Tensor) -> bool:
    """Whether a parameter lives on the host while its device is another."""
    return hasattr(parameter, _MARK)


def device_of(parameter: Tensor) -> torch.device:
    """The device that computes with a parameter."""
    if is_on_host(parameter) and isinstance(parameter, DTensor):
        return torch.device(parameter.device_mesh.device_type)
    return local_part(parameter).device


def gradient_on_host(parameter: Tensor, local: Tensor) -> Tensor:
    """A gradient of a parameter on the host, of which this rank's part is on the device, as a tensor that may stand in
    ``.grad``: torch asks whether what it shows to be a device is the parameter's.
    """
    assert isinstance(parameter, DTensor)
    gradient = dtensor_of(local_part(parameter), parameter)
    put_local(gradient, local)
    return gradient


class Visit:
    """A parameter from the host, on its way to the device, with its gradient where that is on the host as well."""

    def __init__(self, parameter: Tensor, with_gradient: bool, lane: int) -> None:
        self.parameter, self.home = parameter, local_part(parameter)
        self.here = _copy(self.home, device_of(parameter), lane)
        self._gradient = parameter.grad if with_gradient else None
        self._gradient_home = None if self._gradient is None else local_part(self._gradient)
        gradient = self._gradient_home
        self._gradient_here = None if gradient is None else _copy(gradient, device_of(parameter), lane)

    def wait(self) -> None:
        """Let the device go on when they are there."""
        arrived(self.here, self.home)
        if self._gradient_here is not None and self._gradient_home is not None:
            arrived(self._gradient_here, self._gradient_home)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the parameter and its gradient be what has come; behind it they are at home as they were."""
        swapped = [(self.parameter, self.here, self.home)]
        if self._gradient is not None and self._gradient_here is not None and self._gradient_home is not None:
            swapped.append((self._gradient, self._gradient_here, self._gradient_home))
        self._gradient_here = None
        for tensor, here, _ in swapped:
            put_local(tensor, here)
        try:
            yield
        finally:
            for tensor, _, home in swapped:
                put_local(tensor, home)


def _copy(home: Tensor, device: torch.device, lane: int) -> Tensor:
    return start_copy(home, torch.empty_like(home, device=device, pin_memory=False), lane)

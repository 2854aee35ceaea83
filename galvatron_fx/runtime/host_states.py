"""Optimizer states in the host's memory, or on disk: they come to the device for the update of their parameter, and go
back; parameters that are on the host come and go with them.

Between steps a state is a tensor on the host, pinned where the device is a GPU, or mapped to a file, and lies as its
parameter does. On CPUs it is another tensor, so that tests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cost_models.host_states import update_order
from galvatron_fx.ir.graph.host_copies import arrived, settle, start_copy, to_host
from galvatron_fx.ir.torch_compat.dtensors import dtensor_of
from galvatron_fx.runtime.disk_states import Storage
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.host_parameters import Visit, device_of, is_on_host, mark_like
from galvatron_fx.runtime.optimizer_states import shards_of
from galvatron_fx.runtime.pinned import empty_pinned

__all__ = ["StreamedStates", "empty_on_host", "has_host_states", "keep_like", "keep_on_host", "streamed"]

_MARK = "states_on_host"  # of a parameter: where its states belong
_THERE = "is_on_host"  # of a state: that it is there, and in which storage
_COMING = 1  # the lane of what comes to the device: what goes to the host is on the other

States = MutableMapping[Tensor, dict[str, Any]]
"""As optimizers keep them."""


def keep_on_host(model: nn.Module, names: Collection[str], storage: Storage | None = None) -> None:
    """Have optimizers keep the states of such parameters of ``model`` on the host, or in ``storage`` on disk, from
    their next step on.
    """
    for name, parameter in model.named_parameters():
        if name in names:
            setattr(parameter, _MARK, storage)


def keep_like(parameter: Tensor, other: Tensor) -> None:
    """Keep the states of a parameter where those of another are kept, which is where that is."""
    if has_host_states(other):
        setattr(parameter, _MARK, getattr(other, _MARK))
    mark_like(parameter, other)


def has_host_states(parameter: Tensor) -> bool:
    """Whether the states of a parameter belong on the host, or on disk."""
    return hasattr(parameter, _MARK)


def empty_on_host(like: Tensor, parameter: Tensor) -> Tensor:
    """A tensor for a state of ``parameter`` where these belong, that lies as ``like`` does, with nothing in it."""
    return _there(_room(parameter, local_part(like)), like, parameter)


def _room(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor like this rank's part of a state of ``parameter``, where these belong."""
    storage: Storage | None = getattr(parameter, _MARK, None)
    if storage is not None:
        return storage.empty_like(local)
    return torch.empty_like(local) if device_of(parameter).type == "cpu" else empty_pinned(local)


def streamed(states: States, parameters: Sequence[Tensor], update: Callable[[Tensor], None]) -> None:
    """Call ``update`` of each parameter while its states are on the device: while those of one go, the next one's come.

    Behind it they are on the host, where any process may read them; also where ``update`` raises, but for those of its
    parameter, which stay on the device.
    """
    shards = shards_of(parameters)
    queue = [parameters[i] for i in update_order(shards)]
    stream = StreamedStates([[(states, parameter)] for parameter in queue], gradients_come=True)
    try:
        for parameter in queue:
            stream.update(parameter, partial(update, parameter))
    finally:
        stream.end()


class StreamedStates:
    """States of parameters that are updated in the order of ``groups``, each with where its states are kept: those of
    a group come at once (:func:`cost_models.host_states.update_groups`).

    ``gradients_come``: gradients of parameters on the host are there, too, and come to the device with these.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[States, Tensor]]], gradients_come: bool = False) -> None:
        self._groups = deque(groups)
        self._gradients_come = gradients_come
        self._gone = _Going()  # of the group before
        self._going = _Going()
        self._coming: dict[Tensor, tuple[States, _Coming]] = {}
        self._here = False  # whether they have come

    def update(self, parameter: Tensor, update: Callable[[], None]) -> None:
        """Call ``update`` while the states of ``parameter`` are on the device, where it belongs to no host. Then they
        go, and behind the last of a group those of the next come.
        """
        while parameter not in self._coming:
            self._next_group()  # others of this one have no gradient in this step
        if not self._here:
            for _, coming in self._coming.values():
                coming.wait()
            self._gone.wait()
            self._here = True
        states, coming = self._coming.pop(parameter)
        coming.give(states[parameter])
        with _on_device(parameter), coming.parameter():
            update()
        self._going.add(parameter, states[parameter], coming)
        if not self._coming and self._groups:
            self._next_group()

    def _next_group(self) -> None:
        """Have the states of a group come, while those of the one before go."""
        if self._here:
            self._gone, self._going, self._here = self._going, _Going(), False
        group = self._groups.popleft()
        self._coming = {p: (states, _Coming.of(states, p, self._gradients_come)) for states, p in group}

    def end(self) -> None:
        """Wait until any process may read the states on the host."""
        self._gone.settle()
        self._going.settle()
        self._coming = {}


@contextmanager
def _on_device(parameter: Tensor) -> Iterator[None]:
    """Have optimizers take the states of a parameter for what they are: on the device."""
    mark = getattr(parameter, _MARK)
    delattr(parameter, _MARK)
    try:
        yield
    finally:
        setattr(parameter, _MARK, mark)


class _Coming:
    """The states of a parameter on their way to the device; ``hosts``: where they come from, by name; ``visit``: the
    parameter, if it is on the host itself.
    """

    def __init__(self, hosts: Mapping[str, Tensor], device: torch.device, visit: Visit | None) -> None:
        self.hosts, self.visit = hosts, visit
        parts = {name: local_part(host) for name, host in hosts.items()}
        self._copies = {
            name: start_copy(part, torch.empty_like(part, device=device, pin_memory=False), _COMING)
            for name, part in parts.items()
        }

    @classmethod
    def of(cls, states: States, parameter: Tensor, with_gradient: bool) -> _Coming:
        """Those of ``parameter`` that are on the host; on the device are those that were made or loaded there."""
        device = device_of(parameter)
        state = states.get(parameter, {})
        hosts = {name: value for name, value in state.items() if _is_there(value, device)}
        return cls(hosts, device, Visit(parameter, with_gradient, _COMING) if is_on_host(parameter) else None)

    def parameter(self) -> AbstractContextManager[None]:
        """Have the parameter be on the device."""
        return nullcontext() if self.visit is None else self.visit.on_device()

    def wait(self) -> None:
        if self.visit is not None:
            self.visit.wait()
        for name, copy in self._copies.items():
            arrived(copy, local_part(self.hosts[name]))

    def give(self, state: dict[str, Any]) -> None:
        """Put them into the ``state`` that the optimizer updates."""
        state |= {name: _lying_like(copy, self.hosts[name]) for name, copy in self._copies.items()}
        self._copies = {}


class _Going:
    """States of parameters on their way to the host."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(self, parameter: Tensor, state: dict[str, Any], came: _Coming) -> None:
        """Those of ``state``, which gets what is on the host in their place: the tensors that they came from, if they
        fit.
        """
        visit = came.visit
        copies = [] if visit is None else [(start_copy(visit.here, visit.home), visit.here)]
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.ndim:
                continue  # a count of steps
            here, host = local_part(value), came.hosts.get(name)
            if host is None or not _belongs(host, parameter) or (host.shape, host.dtype) != (value.shape, value.dtype):
                storage: Storage | None = getattr(parameter, _MARK, None)
                alike = storage is None and here.device.type == "cpu"
                there = to_host(here) if alike else start_copy(here, _room(parameter, here))
                host = _there(there, value, parameter)
            else:
                there = start_copy(here, local_part(host))
            copies.append((there, here))
            state[name] = host
        self._copies += copies

    def wait(self) -> None:
        """Let the device go on when they are there, and let go of them."""
        for there, here in self._copies:
            arrived(there, here)
        self._copies = []

    def settle(self) -> None:
        """Wait until the host may read them."""
        for there, _ in self._copies:
            settle(there)
        self._copies = []


def _is_there(value: Any, device: torch.device) -> bool:
    if not isinstance(value, Tensor) or not value.ndim:
        return False
    return hasattr(value, _THERE) or local_part(value).device.type != device.type


def _there(local: Tensor, like: Tensor, parameter: Tensor) -> Tensor:
    state = _lying_like(local, like)
    setattr(state, _THERE, getattr(parameter, _MARK, None))
    return state


def _belongs(host: Tensor, parameter: Tensor) -> bool:
    """Whether a state that is not on the device is where those of its parameter belong; on the host it may be any."""
    storage = getattr(parameter, _MARK, None)
    return storage is None or getattr(host, _THERE, None) is storage


def _lying_like(local: Tensor, like: Tensor) -> Tensor:
    return dtensor_of(local, like) if isinstance(like, DTensor) else local

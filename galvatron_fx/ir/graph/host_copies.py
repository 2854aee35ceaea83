"""Copies between a device's memory and its host's, as nodes of a graph: started at one node, waited for at another.

On GPUs they run on streams of their own, from and to pinned memory, as those of torch's activation offloading
(``torch/_functorch/_activation_offloading``), and keep strides. On CPUs a copy is another tensor, there at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import meta_of

__all__ = [
    "HOST_COPIES",
    "HOST_MOVES",
    "HOST_STREAM",
    "arrived",
    "comes_from_host",
    "from_host",
    "is_parameter",
    "settle",
    "settle_all",
    "start_copy",
    "to_host",
]

HOST_STREAM = -1
"""The number of the stream that host copies run on, beside those of mesh columns."""

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_library.define("to_host(Tensor x) -> Tensor")
_library.define("from_host(Tensor? x, *, Device device) -> Tensor?")

to_host = torch.ops.galvatron_fx.to_host.default
"""``to_host(x)``: start to copy a tensor into the host's memory."""

from_host = torch.ops.galvatron_fx.from_host.default
"""``from_host(x, device=...)``: start to copy it back into a device's memory. A sum without terms is None and stays."""


def arrived(copy: Tensor | None, source: Tensor | None) -> Tensor | None:
    """Wait for a host copy, which reads ``source`` until then; for none of None."""
    event = None if copy is None else _under_way.pop(copy.data_ptr(), None)
    if event is not None:
        torch.accelerator.current_stream().wait_event(event)
    return copy


def settle(copy: Tensor) -> None:
    """Have this process, not the device alone, wait for a copy and for those that were started before it."""
    event = _under_way.pop(copy.data_ptr(), None)
    if event is not None:
        event.synchronize()


def settle_all() -> None:
    """Have this process wait for all copies that devices wait for."""
    for device, _ in _streams:
        torch.accelerator.current_stream(device).synchronize()


HOST_MOVES = (to_host, from_host)
"""What starts a copy."""

HOST_COPIES = (*HOST_MOVES, arrived)
"""All nodes that host copies are made of."""


def is_parameter(source: fx.Node) -> bool:
    """Whether what a copy to the device is of lives on the host, as parameters do: no block has made it."""
    return source.op == "placeholder" and meta_of(source).block < 0


def comes_from_host(node: fx.Node) -> bool:
    """Whether a node waits for the copy of a parameter that lives on the host."""
    return node.target is arrived and is_parameter(node.args[1])  # type: ignore[arg-type]


_streams: dict[tuple[torch.device, int], torch.Stream] = {}
_under_way: dict[int, torch.Event] = {}  # by address of the copy: what says that it is there


@torch.library.impl(_library, "to_host", "CompositeExplicitAutograd")
def _to_host(x: Tensor) -> Tensor:
    is_cpu = x.device.type == "cpu"
    return start_copy(x, torch.empty_like(x, device="cpu", pin_memory=not is_cpu))


@torch.library.impl(_library, "from_host", "CompositeExplicitAutograd")
def _from_host(x: Tensor | None, *, device: torch.device) -> Tensor | None:
    return None if x is None else start_copy(x, torch.empty_like(x, device=device, pin_memory=False))


def start_copy(source: Tensor, copy: Tensor, lane: int = 0) -> Tensor:
    """Fill ``copy`` and return it; between a GPU and its host beside what is computed from now on, and behind copies of
    the same ``lane``. :func:`arrived` waits for it.
    """
    device = copy.device if source.device.type == "cpu" else source.device
    if device.type == "cpu" or not copy.numel():
        return copy.copy_(source)
    if (device, lane) not in _streams:
        _streams[device, lane] = torch.Stream(device=device)
    stream = _streams[device, lane]
    computing = torch.accelerator.current_stream(device)
    stream.wait_stream(computing)
    torch.accelerator.set_stream(stream)
    copy.copy_(source, non_blocking=True)
    _under_way[copy.data_ptr()] = stream.record_event()
    torch.accelerator.set_stream(computing)
    return copy


@torch.library.register_fake("galvatron_fx::to_host")
def _fake_to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.register_fake("galvatron_fx::from_host")
def _fake_from_host(x: Tensor | None, *, device: torch.device) -> Tensor | None:
    return None if x is None else torch.empty_like(x, device=device)

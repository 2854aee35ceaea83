"""Seconds of what reads and writes memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch

from cost_models.ops import BROADCAST, is_matmul, kind_of
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Device
from galvatron_fx.ir.graph.op_call import OpCall

# A number in, a number out; an array in, an array of the same shape out.
Bytes = TypeVar("Bytes", float, Floats)

_MOST_KEPT = 1 << 16


def traffic_s(device: Device, size_bytes: Bytes) -> Bytes:
    """Seconds of reading or writing so many bytes."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def host_copy_s(device: Device, size_bytes: Bytes, copies: Bytes | float = 1.0) -> Bytes:
    """Seconds of ``copies`` of so many bytes together between the device's and the host's memory; each is started as
    an operator is. Nothing where the device names no link to its host.
    """
    bandwidth = device.host_bandwidth_bytes_per_s
    return size_bytes / bandwidth + copies * device.launch_overhead_s if bandwidth else 0.0 * size_bytes


def disk_s(device: Device, size_bytes: Bytes) -> Bytes:
    """Seconds of reading so many bytes from disk and writing them back. Nothing where the device names no disk."""
    bandwidth = device.disk_bandwidth_bytes_per_s
    return 2 * size_bytes / bandwidth if bandwidth else 0.0 * size_bytes


def dtype_name(call: OpCall) -> str:
    """Name of the dtype that an operator computes in: products in that of what they multiply."""
    specs = (*call.inputs, *call.outputs) if is_matmul(call.target) else (*call.outputs, *call.inputs)
    spec = next((s for s in specs if s is not None), None)
    return str(spec.dtype).removeprefix("torch.") if spec is not None else "float32"


@lru_cache(maxsize=_MOST_KEPT)
def kind_of_call(call: OpCall) -> str:
    """As :func:`cost_models.ops.kind_of`, followed by ``BROADCAST`` where an operator goes through its elements one by
    one and repeats those of a smaller operand, for which GPUs have slower kernels.
    """
    kind, shape = kind_of(call.target), call.outputs[0].shape if call.outputs and call.outputs[0] is not None else ()
    repeats = any(spec.shape != shape and any(size != 1 for size in spec.shape) for spec in call.inputs)
    pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
    return kind + BROADCAST if pointwise and repeats else kind

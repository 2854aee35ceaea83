"""Seconds of what reads and writes memory."""

from __future__ import annotations

from typing import TypeVar

from cost_models.ops import is_matmul
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Device
from galvatron_fx.ir.graph.op_call import OpCall

# A number in, a number out; an array in, an array of the same shape out.
Bytes = TypeVar("Bytes", float, Floats)


def traffic_s(device: Device, size_bytes: Bytes) -> Bytes:
    """Seconds of reading or writing so many bytes."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def dtype_name(call: OpCall) -> str:
    """Name of the dtype that an operator computes in: products in that of what they multiply."""
    specs = (*call.inputs, *call.outputs) if is_matmul(call.target) else (*call.outputs, *call.inputs)
    spec = next((s for s in specs if s is not None), None)
    return str(spec.dtype).removeprefix("torch.") if spec is not None else "float32"

"""Seconds of what reads and writes memory: an operator call, and the optimizer update of parameters."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from cost_models.call_cost import call_cost
from cost_models.curve_time import operator_curve_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Device
from galvatron_fx.ir.cluster.device import UPDATE
from galvatron_fx.ir.graph.op_call import OpCall

# Adam reads the parameter, its gradient and two moments and writes three of them (Kingma & Ba 2015, algorithm 1).
_UPDATE_PASSES = 7


# A number in, a number out; an array in, an array of the same shape out.
Bytes = TypeVar("Bytes", float, Floats)


def traffic_s(device: Device, size_bytes: Bytes) -> Bytes:
    """Seconds of reading or writing so many bytes."""
    return size_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def update_traffic_s(device: Device, size_bytes: Bytes) -> Bytes:
    """Seconds of the optimizer's update of a parameter of so many bytes, or of each of several."""
    curve = device.curve(UPDATE, "float32")
    if curve is None:
        return traffic_s(device, _UPDATE_PASSES * size_bytes)
    seconds = operator_curve_s(curve, np.zeros(1), np.asarray(size_bytes, dtype=np.float64))
    return seconds if isinstance(size_bytes, np.ndarray) else float(seconds[0])


def dtype_name(call: OpCall) -> str:
    """Name of the dtype that an operator computes in."""
    spec = next((s for s in (*call.outputs, *call.inputs) if s is not None), None)
    return str(spec.dtype).removeprefix("torch.") if spec is not None else "float32"


def is_free(call: OpCall) -> bool:
    """Whether an operator costs nothing: views."""
    cost = call_cost(call)
    return not cost.flops and not cost.read_bytes and not cost.written_bytes

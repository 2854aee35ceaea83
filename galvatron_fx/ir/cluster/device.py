"""One kind of device: rates by datasheet or preset, and what was measured of it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from galvatron_fx.ir.cluster.curves import OperatorCurve
from galvatron_fx.ir.errors import ClusterError

__all__ = ["UPDATE", "Device", "checked_number"]

UPDATE = "optimizer_update"
"""The kind of curve that says what Adam's update of one parameter takes, by the bytes of the parameter."""

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_RATES = ("memory_bandwidth_bytes_per_s", "matmul_efficiency", "memory_efficiency")

Pairs = tuple[tuple[Any, float], ...]


def checked_number(what: str, value: object, *, zero: bool = False) -> float:
    """Return ``value`` as a float; refuse what is not a finite number above zero (``zero``: of at least zero)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not is_number or (value == 0 and not zero):
        raise ClusterError(f"{what} is {value!r:.80}; give a finite number {'of at least' if zero else 'above'} 0")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Device:
    """One kind of device.

    ``peak_flops``: floating-point operations a second for matrix products, by dtype name ("float64", "float32",
    "bfloat16", "float16"); given as a mapping, kept as sorted pairs so that a device can be hashed.
    ``matmul_efficiency`` and ``memory_efficiency``: the fraction, above 0 and up to 1, of the peak rate and of
    ``memory_bandwidth_bytes_per_s`` that large operations reach. ``launch_overhead_s``: what every operation takes
    besides its work. ``host_bandwidth_bytes_per_s``: what a copy between the device's and the host's memory moves,
    either way; ``host_memory_bytes``: the share of the host's memory that a device's process has;
    ``disk_bandwidth_bytes_per_s``: what it reads from or writes to disk, while others do. 0: not known, and no limit.

    What was measured takes precedence over these, where there is any: ``curves`` by kind of operator and dtype;
    ``calls``: seconds of single calls, by :func:`galvatron_fx.ir.graph.op_call.call_key`; ``view_s``: seconds of an
    operator that moves nothing; ``sharing``: of ranks that share cores, (ranks that compute at once, seconds relative
    to all of them doing so). Raises ClusterError for anything else.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] | tuple[tuple[str, float], ...]
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    launch_overhead_s: float
    curves: tuple[OperatorCurve, ...] = ()
    calls: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    view_s: float = 0.0
    sharing: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    host_bandwidth_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0
    disk_bandwidth_bytes_per_s: float = 0.0
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        rates = dict(self.peak_flops)
        if not rates or not set(rates) <= set(_FLOATS):
            raise ClusterError(f"peak_flops of '{self.name}' has keys {sorted(rates)}; give some of {_FLOATS}")
        self._keep("peak_flops", self._numbers("peak_flops", rates))
        if not isinstance(self.memory_bytes, int):
            raise ClusterError(f"memory_bytes of '{self.name}' is {self.memory_bytes!r}; give a whole number of bytes")
        checked_number(f"memory_bytes of '{self.name}'", self.memory_bytes)
        for name in _RATES:
            self._keep(name, checked_number(f"{name} of '{self.name}'", getattr(self, name)))
        if not isinstance(self.host_memory_bytes, int):
            raise ClusterError(f"host_memory_bytes of '{self.name}' is {self.host_memory_bytes!r}; give a whole number")
        checked_number(f"host_memory_bytes of '{self.name}'", self.host_memory_bytes, zero=True)
        for name in ("launch_overhead_s", "view_s", "host_bandwidth_bytes_per_s", "disk_bandwidth_bytes_per_s"):
            self._keep(name, checked_number(f"{name} of '{self.name}'", getattr(self, name), zero=True))
        if max(self.matmul_efficiency, self.memory_efficiency) > 1:
            raise ClusterError(f"an efficiency of '{self.name}' is above 1; give fractions of the peak rates")
        self._keep("calls", self._numbers("calls", dict(self.calls)))
        self._keep("sharing", self._numbers("sharing", dict(self.sharing)))
        self._keep("curves", tuple(sorted(self.curves, key=lambda curve: (curve.kind, curve.dtype))))
        if len(self._by_kind) < len(self.curves):
            raise ClusterError(f"'{self.name}' has two curves of one kind and dtype; keep one of them")
        self._keep("_hash", zlib.crc32(repr(self).encode()))

    def __hash__(self) -> int:
        return self._hash

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _numbers(self, name: str, given: Mapping[Any, object]) -> Pairs:
        pairs: Iterable[tuple[Any, object]] = sorted(given.items())
        return tuple((key, checked_number(f"{name}['{key}'] of '{self.name}'", value)) for key, value in pairs)

    @property
    def flops_rate(self) -> float:
        """Operations a second of large products in the dtype that is fastest, by which kinds are compared."""
        return max(dict(self.peak_flops).values()) * self.matmul_efficiency

    def slower(self, times: float, name: str | None = None) -> Device:
        """A device whose every operator takes ``times`` as long; raises ClusterError for what is no number above 0."""
        times = checked_number(f"how many times slower than '{self.name}'", times)
        curves = (replace(c, points=tuple((amount, s * times) for amount, s in c.points)) for c in self.curves)
        return replace(
            self,
            name=f"{self.name} x{times:g} slower" if name is None else name,
            peak_flops={dtype: rate / times for dtype, rate in dict(self.peak_flops).items()},
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s / times,
            launch_overhead_s=self.launch_overhead_s * times,
            curves=tuple(curves),
            calls={call: s * times for call, s in dict(self.calls).items()},
            view_s=self.view_s * times,
        )

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str], OperatorCurve]:
        return {(curve.kind, curve.dtype): curve for curve in self.curves}

    @cached_property
    def measured_calls(self) -> Mapping[str, float]:
        """Seconds of single calls by their keys."""
        return dict(self.calls)

    @cached_property
    def _first_of_kind(self) -> dict[str, OperatorCurve]:
        return {curve.kind: curve for curve in reversed(self.curves)}

    def curve(self, kind: str, dtype: str | None = None) -> OperatorCurve | None:
        """The curve measured for operators of ``kind`` in ``dtype`` (None: in any that was measured), or None."""
        return self._first_of_kind.get(kind) if dtype is None else self._by_kind.get((kind, dtype))

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak rate for ``dtype`` ("bfloat16", "torch.float32", "int64", ...), in operations a second.

        A dtype without a rate of its own takes that of the closest wider one that has it, since that is what it would
        be computed in: 8-bit floats go to bfloat16 or float16, half precision to float32, that to float64. Integers,
        booleans and complex numbers count as floats of their width (of their real part's width); those below 32
        bits count as float32. Raises ClusterError if nothing as wide is listed.
        """
        rates = dict(self.peak_flops)
        name = dtype.removeprefix("torch.")
        for candidate in _fallbacks(name):
            if candidate in rates:
                return rates[candidate]
        raise ClusterError(f"'{self.name}' lists no rate for {name} or wider; add one to peak_flops {sorted(rates)}")


def _fallbacks(dtype: str) -> tuple[str, ...]:
    """The dtypes whose rate may stand for that of ``dtype``, closest first."""
    if dtype in ("float64", "int64", "uint64", "complex128"):
        return ("float64",)
    if dtype in ("float16", "bfloat16"):
        return (dtype, "float32", "float64")
    if dtype.startswith("float8"):
        return ("bfloat16", "float16", "float32", "float64")
    return ("float32", "float64")

"""Sizes and times as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

from galvatron_fx.ir.errors import InputError

__all__ = ["format_bytes", "format_seconds", "parse_bandwidth", "parse_bytes"]

# Decimal units after the SI (10**3), binary units after IEC 80000-13 (2**10).
_UNITS = {
    "": 1,
    "B": 1,
    **{prefix + "B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{prefix + "iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T", "P"), 1)},
    "KB": 1000,
}
_MOST_BYTES = 2**63 - 1
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that ``text`` says: ``"12GiB"``, ``"500MB"``, ``"1.5 TB"``, ``"1e9"`` or an int.

    ``kB``, ``MB``, ``GB``, ``TB`` and ``PB`` are powers of 1000, ``KiB`` to ``PiB`` powers of 1024; letter case counts,
    because "Gb" means bits. A fraction of a byte is dropped.

    Raises:
        InputError: for a negative or unreadable size, an unknown unit, or more than 2**63 - 1 bytes.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise InputError(f"a size in bytes is an int or text such as '12GiB', not {text!r:.80}: give one")
    if isinstance(text, int):
        return _checked(Decimal(text), text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InputError(f"{text[:80]!r} is not a size in bytes; write a number and a unit, such as '12GiB'")
    number, unit = match.groups()
    if unit not in _UNITS:
        raise InputError(f"{text[:80]!r} has the unknown unit {unit!r}; use one of {', '.join(u for u in _UNITS if u)}")
    return _checked(Decimal(number) * _UNITS[unit], text)


_BITS = re.compile(r"\s*(\d{1,15}(?:\.\d{0,15})?)\s*([MGT])b(?:it)?(?:/s|ps)?\s*", re.ASCII)
# What NCCL takes 100 Gbit/s of network to achieve is 12 GB/s (src/graph/topo.h).
_ACHIEVED = 0.96


def parse_bandwidth(text: str) -> float:
    """Return the bytes a second that ``text`` says: ``"400Gb"`` or ``"400Gbit/s"`` of a port, or ``"48GB/s"``.

    Of bits, which ports are sold by, collectives reach 96 % (NCCL); bytes are taken as what is reached. Raises
    InputError for anything else.
    """
    match = _BITS.fullmatch(text)
    if match is not None:
        bandwidth = float(match[1]) * 1000.0 ** ("MGT".index(match[2]) + 2) / 8 * _ACHIEVED
    elif text.strip().endswith("B/s"):
        bandwidth = float(parse_bytes(text.strip().removesuffix("/s")))
    else:
        raise InputError(f"{text[:80]!r} is no bandwidth: write bits as '400Gb', or bytes as '48GB/s'")
    if bandwidth <= 0:
        raise InputError(f"{text[:80]!r} is a bandwidth of nothing: give one above 0, such as '400Gb'")
    return bandwidth


def _checked(size: Decimal, text: str | int) -> int:
    """Return ``size`` as an int where a 64-bit byte count can hold it."""
    if size < 0:
        raise InputError(f"a size in bytes cannot be negative, and {text} is; give a size such as '12GiB'")
    if size > _MOST_BYTES:
        raise InputError(f"{str(text)[:80]!r} is more than 2**63 - 1 bytes; check the number and its unit")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """Return a size in decimal units with three significant digits: ``format_bytes(12_500_000_000) == "12.5 GB"``."""
    return _scaled(float(size_bytes), {"PB": 1e15, "TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}, zero="0 B")


def format_seconds(seconds: float) -> str:
    """Return a time in s, ms, us or ns with three significant digits: ``format_seconds(0.0123) == "12.3 ms"``."""
    return _scaled(float(seconds), {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, zero="0 s")


def _scaled(value: float, units: dict[str, float], *, zero: str) -> str:
    """Write ``value`` in the largest unit (they come largest first) that leaves at least 1 before the point."""
    if value == 0:
        return zero
    # 0.9995 of a unit would be rounded up to 1 of it, so it already counts as one.
    fitting = [unit for unit, scale in units.items() if abs(value) >= 0.9995 * scale]
    unit = fitting[0] if fitting else list(units)[-1]
    digits = Decimal(f"{value / units[unit]:.3g}")
    return f"{digits.normalize():f} {unit}"

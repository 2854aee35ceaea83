"""What a profile was measured on, and how to tell that it no longer fits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime

from galvatron_fx.ir.errors import ClusterError

__all__ = ["MOST_DAYS", "Origin"]

MOST_DAYS = 30
"""Older profiles are stale: drivers, kernels and neighbours on the machine have changed by then."""


@dataclass(frozen=True)
class Origin:
    """The machine and the software of a measurement.

    ``measured``: day, as "2026-11-21"; ``device``: name of the processor or GPU; ``device_type``: "cpu" or "cuda";
    ``torch``: version; ``threads``: of one process; ``world_size``: processes that measured at once.
    Raises ClusterError for a day that is none.
    """

    measured: str
    device: str
    device_type: str
    torch: str
    threads: int
    world_size: int

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.measured)
        except ValueError:
            raise ClusterError(f"measured is {self.measured!r:.80}; give a day such as 2026-11-21") from None

    def differences(self, here: Origin) -> list[str]:
        """Say what of ``here``, the machine at hand, differs; empty where the profile fits it."""
        said = {
            "device": "device",
            "device_type": "device type",
            "torch": "torch version",
            "threads": "threads a process",
            "world_size": "number of ranks",
        }
        differences = [
            f"{words} {getattr(self, name)}, now {getattr(here, name)}"
            for name, words in said.items()
            if getattr(self, name) != getattr(here, name)
        ]
        age = (date.fromisoformat(here.measured) - date.fromisoformat(self.measured)).days
        if age > MOST_DAYS:
            differences.append(f"measured {age} days ago")
        return differences


def today() -> str:
    """The day in UTC, as an origin has it."""
    return datetime.now(UTC).date().isoformat()

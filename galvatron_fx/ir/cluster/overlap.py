"""How computing and communicating at once slow each other down, and how long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.device import checked_number
from galvatron_fx.ir.errors import ClusterError

__all__ = ["Overlap", "Skew"]

Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True)
class Skew:
    """How long a rank waits in a collective until the last of the others has come.

    Ranks do not compute equally fast, least those that share cores: after computing for t seconds the last comes
    ``late_s * t ** growth`` later than the mean of all, and no more than t. As in a random walk, ``growth`` is near
    1/2: 0.45 was measured from 1 to 250 ms, with 2 and with 4 processes on 2 cores. None (``late_s`` 0) for ranks that
    are taken to be equally fast.
    Raises ClusterError for what are no numbers, ``late_s`` of at least 0 and ``growth`` above 0 and up to 1.
    """

    late_s: float = 0.0
    growth: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "late_s", checked_number("late_s of the skew", self.late_s, zero=True))
        object.__setattr__(self, "growth", checked_number("growth of the skew", self.growth))
        if self.growth > 1.0:
            raise ClusterError(f"growth of the skew is {self.growth}; give a number above 0 and up to 1")

    def seconds(self, computed_s: Amount) -> Amount:
        """Seconds of waiting after so many of computing; a number for a number, an array for an array."""
        late = np.minimum(self.late_s * np.asarray(computed_s) ** self.growth, computed_s)
        return late if isinstance(computed_s, np.ndarray) else float(late)


@dataclass(frozen=True)
class Overlap:
    """How many times longer each takes while the other runs (Galvatron's overlap coefficients; Miao et al. 2022, 3.4).

    ``compute``: operators while collectives run, ``communication``: the other way round. 1 each: neither feels the
    other; 2 each: they share what they need evenly, as processes on one core do. ``skew``: what a collective takes
    longer after computing. ``chunks``: whether collectives may travel in chunks beside the products in front of them or
    behind them, where that is priced as faster (:mod:`passes.lowering.communication.chunk_collectives`).
    Raises ClusterError for factors that are no numbers above 0.
    """

    compute: float = 1.0
    communication: float = 1.0
    skew: Skew = field(default_factory=Skew)
    chunks: bool = False

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            object.__setattr__(self, name, checked_number(f"overlap of {name}", getattr(self, name)))
        if not isinstance(self.chunks, bool):
            raise ClusterError(f"chunks of the overlap is {self.chunks!r:.80}; give True or False")

    @property
    def gains(self) -> bool:
        """Whether both at once get done more than one after the other: whether their rates add up to more than 1."""
        return 1 / self.compute + 1 / self.communication > 1

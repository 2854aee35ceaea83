"""How computing and communicating at once slow each other down, and how long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron_fx.ir.device import checked_number

__all__ = ["Overlap", "Skew"]

Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True)
class Skew:
    """How long a rank waits in a collective until the last of the others has come.

    Ranks do not compute equally fast, least those that share cores: after computing for t seconds the last comes
    ``most_s * (1 - exp(-t / after_s))`` later than the mean of all, which no longer grows where the operating system
    has had the time to even it out. None for ranks that are taken to be equally fast.
    Raises ClusterError for what are no numbers, ``most_s`` of at least 0 and ``after_s`` above.
    """

    most_s: float = 0.0
    after_s: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "most_s", checked_number("most_s of the skew", self.most_s, zero=True))
        object.__setattr__(self, "after_s", checked_number("after_s of the skew", self.after_s))

    def seconds(self, computed_s: Amount) -> Amount:
        """Seconds of waiting after so many of computing; a number for a number, an array for an array."""
        late = self.most_s * -np.expm1(-np.asarray(computed_s) / self.after_s)
        return late if isinstance(computed_s, np.ndarray) else float(late)


@dataclass(frozen=True)
class Overlap:
    """How many times longer each takes while the other runs (Galvatron's overlap coefficients; Miao et al. 2022, 3.4).

    ``compute``: operators while collectives run, ``communication``: the other way round. 1 each: neither feels the
    other; 2 each: they share what they need evenly, as processes on one core do. ``skew``: what a collective takes
    longer after computing.
    Raises ClusterError for factors that are no numbers above 0.
    """

    compute: float = 1.0
    communication: float = 1.0
    skew: Skew = field(default_factory=Skew)

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            object.__setattr__(self, name, checked_number(f"overlap of {name}", getattr(self, name)))

    @property
    def gains(self) -> bool:
        """Whether both at once get done more than one after the other: whether their rates add up to more than 1."""
        return 1 / self.compute + 1 / self.communication > 1

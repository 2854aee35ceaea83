"""How computing and communicating at once slow each other down."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_fx.ir.device import checked_number

__all__ = ["Overlap"]


@dataclass(frozen=True)
class Overlap:
    """How many times longer each takes while the other runs (Galvatron's overlap coefficients; Miao et al. 2022, 3.4).

    ``compute``: operators while collectives run, ``communication``: the other way round. 1 each: neither feels the
    other; 2 each: they share what they need evenly, as processes on one core do.
    Raises ClusterError for factors that are no numbers above 0.
    """

    compute: float = 1.0
    communication: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            object.__setattr__(self, name, checked_number(f"overlap of {name}", getattr(self, name)))

    @property
    def gains(self) -> bool:
        """Whether both at once get done more than one after the other: whether their rates add up to more than 1."""
        return 1 / self.compute + 1 / self.communication > 1

"""How much a step trains, and how well it uses the devices: tokens a second and model flops utilisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from galvatron_fx.ir.errors import PlanError

__all__ = ["Throughput"]


@dataclass(frozen=True)
class Throughput:
    """What one step trains: ``samples``, and ``tokens`` of them (0 where the inputs have no sequence).

    ``peak_s``: seconds that all devices together would take for the model's flops at the peak rates of their datasheet
    (:func:`cost_models.graph_cost.model_seconds`).
    """

    samples: int
    tokens: int
    peak_s: float

    def mfu(self, step_s: float) -> float:
        """Model flops utilisation of a step of so many seconds, a share: 0.4 for 40 % (Chowdhery et al. 2022, PaLM,
        appendix B). Model flops are those of matrix products, attention and convolutions in forward and backward as
        captured: what a plan computes again counts as time, and not as flops.
        """
        return self.peak_s / step_s if step_s > 0 else 0.0

    def per_s(self, step_s: float) -> float:
        """Tokens a second, samples where there are no tokens."""
        return (self.tokens or self.samples) / step_s if step_s > 0 else 0.0

    @property
    def unit(self) -> str:
        """What :meth:`per_s` counts: "tokens" or "samples"."""
        return "tokens" if self.tokens else "samples"

    def describe(self, step_s: float) -> str:
        """Return it in words: "26,300 tokens/s, MFU 41.2%"."""
        rate = self.per_s(step_s)
        return f"{f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} {self.unit}/s, MFU {self.mfu(step_s):.1%}"

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON values."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, document: Mapping[str, float] | None) -> Throughput | None:
        """Read what :meth:`to_dict` wrote, which the schema has checked; None stays None."""
        return None if document is None else cls(**document)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.samples < 1 or self.tokens < 0 or not self.peak_s >= 0:
            raise PlanError(f"throughput of a plan is {vars(self)}; give one sample or more, and no negative numbers")
        object.__setattr__(self, "peak_s", float(self.peak_s))

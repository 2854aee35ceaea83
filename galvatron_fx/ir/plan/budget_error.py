"""What is raised where no plan fits; it holds a plan, so it lies with plans and not with the other errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from galvatron_fx.ir.errors import GalvatronError

if TYPE_CHECKING:
    from galvatron_fx.ir.plan.plan import Plan

__all__ = ["BudgetError", "Remedy"]


@dataclass(frozen=True)
class Remedy:
    """Options (``changes``, by name) beside those of a search that found nothing, with which a plan takes
    ``least_bytes`` a rank at the peak, in ``step_s`` seconds a step: so long at most where it may take more.
    """

    changes: Mapping[str, Any]
    least_bytes: int
    step_s: float

    @property
    def text(self) -> str:
        """As arguments of :func:`galvatron_fx.plan`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.changes.items())


class BudgetError(GalvatronError):
    """Raised when no plan fits the memory budget, or one that was given does not.

    ``least_bytes`` is the peak memory per rank, in bytes, of the leanest plan that was found (or of the given one), and
    ``plan`` is that plan, or None where the search stopped before it could build one. ``remedies``: what would take
    less, what fits first, where :func:`galvatron_fx.plan` has looked for it.
    """

    def __init__(
        self, message: str, *, least_bytes: int, plan: Plan | None = None, remedies: tuple[Remedy, ...] = ()
    ) -> None:
        super().__init__(message)
        self.remedies = remedies
        self.least_bytes = least_bytes
        self.plan = plan

"""What is raised where no plan fits; it holds a plan, so it lies with plans and not with the other errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from galvatron_fx.ir.errors import GalvatronError

if TYPE_CHECKING:
    from galvatron_fx.ir.plan.plan import Plan

__all__ = ["BudgetError"]


class BudgetError(GalvatronError):
    """Raised when no plan fits the memory budget, or one that was given does not.

    ``least_bytes`` is the peak memory per rank, in bytes, of the leanest plan that was found (or of the given one), and
    ``plan`` is that plan, or None where the search stopped before it could build one.
    """

    def __init__(self, message: str, *, least_bytes: int, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.plan = plan

"""The errors a user can cause, by the names that users catch; they are made below, beside what raises them."""

from galvatron_fx.ir.errors import (
    CaptureError,
    CheckpointError,
    ClusterError,
    DifferenceError,
    GalvatronError,
    InputError,
    LostRankError,
    PlanError,
    ShardingError,
    StorageError,
    TimeLimitError,
    VerifierError,
)
from galvatron_fx.ir.plan.budget_error import BudgetError

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DifferenceError",
    "GalvatronError",
    "InputError",
    "LostRankError",
    "PlanError",
    "ShardingError",
    "StorageError",
    "TimeLimitError",
    "VerifierError",
]

"""The optimizers that a plan can be made for, by name; :mod:`cost_models.optimizer` says what each takes."""

from __future__ import annotations

from typing import Any

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.arguments import shown

__all__ = ["ADAM", "OPTIMIZERS", "check_optimizer"]

ADAM = "adam"
"""What is planned for where nothing is said."""

OPTIMIZERS = (ADAM, "adamw", "sgd", "sgd_momentum", "adafactor", "muon", "adama")


def check_optimizer(name: Any) -> None:
    """Raise PlanError that lists the known names, unless ``name`` is one of them."""
    if name not in OPTIMIZERS:
        raise PlanError(
            f"optimizer is {shown(name)}: use one of {', '.join(OPTIMIZERS)}, or the one whose states are as large"
        )

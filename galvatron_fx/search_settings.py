"""The options that say what plan to search, as they are given to :func:`galvatron_fx.plan` and its kin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from galvatron_fx.arguments import check_cluster
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from galvatron_fx.ir.plan.optimizers import ADAM, check_optimizer
from galvatron_fx.ir.plan.strategy import CAPACITY, ROLES, Strategy
from galvatron_fx.ir.plan.units import parse_bytes
from passes.search.configurations import Pins
from passes.search.plan_search import SearchOptions

__all__ = ["Constraints", "SearchSettings"]

Constraints = Mapping[str, Strategy | Sequence[str] | str]


@dataclass(frozen=True)
class SearchSettings:
    """See :func:`galvatron_fx.plan`, which has the same defaults."""

    memory_budget: str | int | None = None
    roles: Sequence[str] = ROLES
    recompute: str | bool = "auto"
    constraints: Constraints | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    search_seconds: float | None = None
    optimizer: str = ADAM
    expert_imbalance: float = CAPACITY

    def on(self, cluster: Cluster) -> SearchOptions:
        """What to search on ``cluster``; raises InputError and PlanError for what no search can use."""
        check_cluster(cluster)
        checked_elsewhere = ("memory_budget", "optimizer")
        check_arguments(**{name: value for name, value in vars(self).items() if name not in checked_elsewhere})
        check_optimizer(self.optimizer)
        budget = self.budget_bytes
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown or not self.roles:
            raise PlanError(f"unknown role(s) {unknown or list(self.roles)}: use some of {', '.join(ROLES)}")
        pins = Pins(self.num_stages, self.num_microbatches, self.schedule)
        return SearchOptions(
            cluster.device.memory_bytes if budget is None else budget,
            tuple(self.roles),
            self.recompute,
            dict(self.constraints or {}),
            pins,
            self.search_seconds,
            self.optimizer,
            capacity=self.expert_imbalance,
        )

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes, None where none was given; raises InputError for what is no size."""
        if self.memory_budget is None:
            return None
        try:
            return parse_bytes(self.memory_budget)
        except InputError as error:
            raise InputError(f"memory_budget: {error}") from None

    def refuse_beside_a_plan(self) -> None:
        """Raise PlanError where something was given that a given plan has decided, all but the budget."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "memory_budget" and (value or None) != field.default:
                raise PlanError(
                    f"{field.name}={shown(value)} is given beside plan=, which has decided that already: leave out "
                    f"{field.name}=, or leave out plan= to search one with it"
                )

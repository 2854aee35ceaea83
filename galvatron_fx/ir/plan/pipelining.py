"""How a plan runs its blocks in stages and its batch in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.schedule import Action, Schedule, check_schedule, make_schedule, stage_ranks

__all__ = ["BY_HAND", "ONE_STAGE", "Pipelining", "even_cuts"]

BY_HAND = "table"
"""The name of a schedule that is given action by action."""


@dataclass(frozen=True)
class Pipelining:
    """Stages, micro-batches and the order in which they run; the default is one stage and the whole batch at once.

    ``first_blocks``: the first block of every stage, ascending from 0, or () to cut the blocks evenly by number;
    ``num_microbatches``: equal parts of the batch; ``schedule``: one of
    :data:`galvatron_fx.ir.plan.schedule.SCHEDULES`, or "table" with ``orders``: for each pipeline rank its actions in
    order, as text such as "0F0" (see :class:`galvatron_fx.ir.plan.schedule.Action`), and ``rank_of_stage``.

    Raises PlanError where the parts do not fit each other.
    """

    num_stages: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    first_blocks: tuple[int, ...] = ()
    orders: tuple[tuple[str, ...], ...] = ()
    rank_of_stage: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name} is {value!r}; give an int from 1")
        if self.first_blocks:
            ascending = all(a < b for a, b in zip(self.first_blocks, self.first_blocks[1:], strict=False))
            if self.first_blocks[0] != 0 or not ascending or len(self.first_blocks) != self.num_stages:
                raise PlanError(
                    f"first_blocks is {self.first_blocks} for {self.num_stages} stages; give the first block of every "
                    f"stage, ascending from 0"
                )
        if bool(self.orders) != (self.schedule == BY_HAND):
            raise PlanError(f"schedule is {self.schedule!r}: give orders with 'table', and with no other")

    @property
    def is_trivial(self) -> bool:
        """Whether there is one stage and one micro-batch."""
        return self.num_stages == 1 and self.num_microbatches == 1

    def cuts(self, num_blocks: int) -> tuple[int, ...]:
        """The first block of every stage; raises PlanError where there are fewer blocks than stages."""
        cuts = self.first_blocks or even_cuts(num_blocks, self.num_stages)
        if num_blocks < self.num_stages or cuts[-1] >= num_blocks:
            raise PlanError(
                f"{self.num_stages} stages that begin with blocks {cuts} do not fit a model of {num_blocks} blocks: "
                f"use at most {num_blocks} stages, each with a block"
            )
        return cuts

    def table(self, num_ranks: int) -> Schedule:
        """The schedule on ``num_ranks`` pipeline ranks, checked; raises PlanError where it cannot run."""
        if self.schedule != BY_HAND:
            return make_schedule(self.schedule, num_ranks, self.num_stages, self.num_microbatches)
        actions = tuple(tuple(map(Action.parse, order)) for order in self.orders)
        table = Schedule(BY_HAND, self.rank_of_stage, self.num_microbatches, actions)
        if table.num_ranks != num_ranks or table.num_stages != self.num_stages:
            raise PlanError(
                f"the table has {table.num_ranks} ranks and {table.num_stages} stages, the plan {num_ranks} pipeline "
                f"ranks and {self.num_stages} stages: make them equal"
            )
        check_schedule(table)
        return table

    def ranks(self, num_ranks: int) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return self.rank_of_stage or stage_ranks(self.schedule, num_ranks, self.num_stages)

    @classmethod
    def by_hand(cls, schedule: Schedule, first_blocks: tuple[int, ...] = ()) -> Pipelining:
        """Take a schedule as it stands."""
        orders = tuple(tuple(map(str, order)) for order in schedule.orders)
        return cls(
            schedule.num_stages, schedule.num_microbatches, BY_HAND, first_blocks, orders, schedule.rank_of_stage
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        fields = asdict(self)
        return {
            **fields,
            "first_blocks": list(self.first_blocks),
            "orders": [list(order) for order in self.orders],
            "rank_of_stage": list(self.rank_of_stage),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Pipelining:
        """Build from what :meth:`to_dict` returned, checked against the plan's schema before."""
        orders = tuple(tuple(order) for order in fields["orders"])
        lists = {name: tuple(fields[name]) for name in ("first_blocks", "rank_of_stage")}
        return cls(**{**fields, **lists, "orders": orders})


ONE_STAGE = Pipelining()
"""No pipeline: one stage and the whole batch at once."""


def even_cuts(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """First blocks of stages with numbers of blocks that differ by one at most."""
    return tuple(stage * num_blocks // num_stages for stage in range(num_stages))

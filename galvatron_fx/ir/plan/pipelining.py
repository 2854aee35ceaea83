"""How a plan runs its blocks in stages and its batch in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule, check_schedule, make_schedule, stage_ranks
from galvatron_fx.ir.plan.spread_ends import make_spread_schedule

__all__ = ["BY_HAND", "ENDS", "ONE_STAGE", "SPREAD_ENDS", "VOCABULARIES", "Pipelining", "even_cuts"]

BY_HAND = "table"
"""The name of a schedule that is given action by action."""

VOCABULARIES = ENDS, SPREAD_ENDS = "ends", "spread"
"""Where embedding and head are: in the first and last stage, or spread over all pipeline ranks."""


@dataclass(frozen=True)
class Pipelining:
    """Stages, micro-batches and the order in which they run; the default is one stage and the whole batch at once.

    ``first_blocks``: the first block of every stage, ascending from 0, or () to cut the blocks evenly by number;
    ``num_microbatches``: equal parts of the batch; ``schedule``: one of
    :data:`galvatron_fx.ir.plan.schedule.SCHEDULES`, or "table" with ``orders``: for each pipeline rank its actions in
    order, as text such as "0F0" (see :class:`galvatron_fx.ir.plan.schedule.Action`), and ``rank_of_stage``.

    ``vocabulary``: "ends" leaves the first block (the embedding) to the first stage and the last (head and loss) to the
    last one; "spread" makes each a stage of its own that all pipeline ranks compute together, with equal parts of the
    vocabulary. ``num_stages`` and ``first_blocks``, which begin at 1, are then those of the blocks between; in a table
    the embedding is stage 0, and ``rank_of_stage`` -1 for both.

    Raises PlanError where the parts do not fit each other.
    """

    num_stages: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    first_blocks: tuple[int, ...] = ()
    orders: tuple[tuple[str, ...], ...] = ()
    rank_of_stage: tuple[int, ...] = ()
    vocabulary: str = ENDS

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name} is {value!r}; give an int from 1")
        if self.vocabulary not in VOCABULARIES:
            raise PlanError(f"vocabulary is {self.vocabulary!r:.80}; give {ENDS!r} or {SPREAD_ENDS!r}")
        if self.first_blocks:
            first = int(self.is_spread)
            ascending = all(a < b for a, b in zip(self.first_blocks, self.first_blocks[1:], strict=False))
            if self.first_blocks[0] != first or not ascending or len(self.first_blocks) != self.num_stages:
                raise PlanError(
                    f"first_blocks is {self.first_blocks} for {self.num_stages} stages; give the first block of every "
                    f"stage, ascending from {first}"
                )
        if bool(self.orders) != (self.schedule == BY_HAND):
            raise PlanError(f"schedule is {self.schedule!r}: give orders with 'table', and with no other")

    @property
    def is_trivial(self) -> bool:
        """Whether there is one stage and one micro-batch."""
        return self.num_stages == 1 and self.num_microbatches == 1

    @property
    def is_spread(self) -> bool:
        """Whether all pipeline ranks compute embedding and head together."""
        return self.vocabulary == SPREAD_ENDS

    def cuts(self, num_blocks: int) -> tuple[int, ...]:
        """The first block of every stage; raises PlanError where there are fewer blocks than stages."""
        if self.is_spread:
            return self._cuts_between(num_blocks)
        cuts = self.first_blocks or even_cuts(num_blocks, self.num_stages)
        if num_blocks < self.num_stages or cuts[-1] >= num_blocks:
            raise PlanError(
                f"{self.num_stages} stages that begin with blocks {cuts} do not fit a model of {num_blocks} blocks: "
                f"use at most {num_blocks} stages, each with a block"
            )
        return cuts

    def _cuts_between(self, num_blocks: int) -> tuple[int, ...]:
        """The same with the first and the last block as stages."""
        between = max(num_blocks - 2, 0)
        cuts = self.first_blocks or tuple(1 + cut for cut in even_cuts(between, self.num_stages))
        if between < self.num_stages or cuts[-1] > between:
            raise PlanError(
                f"{self.num_stages} stages that begin with blocks {cuts}, between an embedding and a head that all "
                f"ranks compute, do not fit a model of {num_blocks} blocks: use at most {between} stages, or "
                f"vocabulary={ENDS!r}"
            )
        return (0, *cuts, num_blocks - 1)

    def table(self, num_ranks: int) -> Schedule:
        """The schedule on ``num_ranks`` pipeline ranks, checked; raises PlanError where it cannot run."""
        if self.schedule != BY_HAND:
            make = make_spread_schedule if self.is_spread else make_schedule
            return make(self.schedule, num_ranks, self.num_stages, self.num_microbatches)
        actions = tuple(tuple(map(Action.parse, order)) for order in self.orders)
        table = Schedule(BY_HAND, self.rank_of_stage, self.num_microbatches, actions)
        num_stages = self.num_stages + 2 * self.is_spread
        if table.num_ranks != num_ranks or table.num_stages != num_stages:
            raise PlanError(
                f"the table has {table.num_ranks} ranks and {table.num_stages} stages, the plan {num_ranks} pipeline "
                f"ranks and {num_stages} stages: make them equal"
            )
        spread = [stage for stage, rank in enumerate(table.rank_of_stage) if rank == SPREAD]
        if spread != [0, num_stages - 1] * self.is_spread:
            raise PlanError(
                f"stages {spread} of the table are of all ranks (-1 in rank_of_stage), and vocabulary is "
                f"{self.vocabulary!r}: these are the first and the last stage with {SPREAD_ENDS!r}, none with {ENDS!r}"
            )
        check_schedule(table)
        return table

    def ranks(self, num_ranks: int) -> tuple[int, ...]:
        """The pipeline rank of every stage, -1 for one of all ranks."""
        ranks = stage_ranks(self.schedule, num_ranks, self.num_stages) if not self.rank_of_stage else ()
        return self.rank_of_stage or ((SPREAD, *ranks, SPREAD) if self.is_spread else ranks)

    @classmethod
    def by_hand(cls, schedule: Schedule, first_blocks: tuple[int, ...] = ()) -> Pipelining:
        """Take a schedule as it stands."""
        orders = tuple(tuple(map(str, order)) for order in schedule.orders)
        is_spread = SPREAD in schedule.rank_of_stage
        return cls(
            schedule.num_stages - 2 * is_spread,
            schedule.num_microbatches,
            BY_HAND,
            first_blocks,
            orders,
            schedule.rank_of_stage,
            SPREAD_ENDS if is_spread else ENDS,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; of ``vocabulary`` only where it is spread."""
        fields = asdict(self)
        if not self.is_spread:
            del fields["vocabulary"]
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

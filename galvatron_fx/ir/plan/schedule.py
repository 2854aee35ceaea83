"""Pipeline schedules as data: what every pipeline rank computes, in which order, and whether that can run at all.

A schedule is a table of :class:`Action`, one row per pipeline rank, without transfers and without times. The orders
are torch's own (``torch.distributed.pipelining``):

==================== ============== ===========================================================================
name                 stages a rank  source
==================== ============== ===========================================================================
``gpipe``            1              Huang et al. 2019, arXiv:1811.06965
``1f1b``             1              Narayanan et al. 2019 (PipeDream-Flush, arXiv:2006.09503)
``interleaved_1f1b`` 2 or more      Narayanan et al. 2021, arXiv:2104.04473, section 2.2; torch's "flexible" rounds
``zb_h1``            1              Qi et al. 2023, arXiv:2401.10241, section 2 (torch: interleaved zero bubble)
``zbv``              2, in a V      the same, section 6
``dualpipev``        2, in a V      DeepSeek-V3, arXiv:2412.19437, cut in half; overlapped pairs run one after another
==================== ============== ===========================================================================

Importing this file does not import torch; :func:`make_schedule` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.schedule_table import Cell, render

__all__ = [
    "ACTION_NAMES",
    "FORWARD_ONLY_SCHEDULE",
    "KINDS",
    "SCHEDULES",
    "SEARCH",
    "SPREAD",
    "Action",
    "Schedule",
    "Step",
    "check_schedule",
    "legal",
    "make_schedule",
    "stage_ranks",
]

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")

FORWARD_ONLY_SCHEDULE = "gpipe"
"""What plans without backward follow: all schedules of one stage a rank have their forwards in its order."""

SEARCH = "search"
"""Stands for the table that a search finds best (:mod:`passes.search.tables`); the plan then has that table."""

SPREAD = -1
"""The rank of a stage that all pipeline ranks compute together, each its share: none starts before all are there."""

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""What an action of each kind computes; "B" is "I" and "W" in one."""

KINDS = tuple(ACTION_NAMES)

_ONE_STAGE = ("gpipe", "1f1b", "zb_h1")
_IN_A_V = ("zbv", "dualpipev")
_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")
_KEYS = ("name", "rank_of_stage", "num_microbatches", "orders")
_UNIT_STEPS = {"F": 1, "B": 2, "I": 1, "W": 1}
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Compute one micro-batch on one stage; ``kind`` is one of :data:`KINDS`, both numbers count from 0.

    Raises PlanError for another kind and for numbers that are not ints from 0.
    """

    kind: str
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"unknown kind of action {self.kind!r}; use one of {', '.join(KINDS)}")
        if not _is_count(self.stage) or not _is_count(self.microbatch):
            raise PlanError(
                f"an action with stage {self.stage!r} and microbatch {self.microbatch!r}; give ints that count from 0"
            )

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` wrote: ``2W1`` is the weight gradients of micro-batch 1 on stage 2; raises PlanError."""
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise PlanError(
                f"{_shorten(text)} is no action; write stage, kind ({', '.join(KINDS)}) and microbatch, such as '2F0'"
            )
        return cls(match[2], int(match[1]), int(match[3]))

    def __str__(self) -> str:
        """Return stage, kind and micro-batch as torch writes them: ``2F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class Step(NamedTuple):
    """One action with what it waits for, in a list where every action comes after all that it waits for.

    ``slot`` is ``4 * stage`` plus the index of the kind in :data:`KINDS`, to look up times by. ``after`` is the
    1-based position, in the same list, of the action on a neighbouring stage whose result arrives first; 0 for none.
    ``rank`` is :data:`SPREAD` where all ranks compute it together.
    """

    action: Action
    rank: int
    slot: int
    after: int


@dataclass(frozen=True)
class Schedule:
    """Say what every pipeline rank computes, in order.

    ``rank_of_stage`` has the pipeline rank of each stage, :data:`SPREAD` for one that all compute together, and
    ``orders`` the actions of each rank, without gaps; actions of spread stages stand in all orders.
    ``name`` is one of :data:`SCHEDULES`, or another for a table made by hand. Nothing is checked here; see
    :func:`check_schedule`.
    """

    name: str
    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The stages of the whole pipeline."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """The pipeline ranks."""
        return len(self.orders)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are anywhere computed apart from input gradients."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of pipeline rank ``rank``, ascending; raises PlanError when there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"pipeline rank {rank} of {self.num_ranks}; give 0 to {self.num_ranks - 1}")
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner in (rank, SPREAD))

    def ranks_of(self, stage: int) -> Sequence[int]:
        """Return the pipeline ranks that compute a stage."""
        owner = self.rank_of_stage[stage]
        return range(self.num_ranks) if owner == SPREAD else (owner,)

    def sends(self, stage: int, to: int) -> bool:
        """Whether values of one stage have to be sent for another: not where its ranks, or all, have them."""
        return self.rank_of_stage[stage] not in (SPREAD, self.rank_of_stage[to])

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All actions, each after all that it waits for, whatever times they take; raises as :func:`check_schedule`."""
        return _checked_steps(self)

    @cached_property
    def holdings(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The micro-batches whose activations a rank holds, per stage, at every moment before it lets one go.

        Entry ``[rank][moment]`` has one count per stage of ``stages_of(rank)``. A micro-batch is held from its F to
        its B, or to its W where backward is split. Only distinct counts are listed, in the order they appear.
        Raises as :func:`check_schedule`.
        """
        return tuple(map(tuple, _holdings(self)))

    def to_dict(self) -> dict[str, object]:
        """Return the schedule as plain JSON values; actions are text such as ``2F0``."""
        return {
            "name": self.name,
            "rank_of_stage": list(self.rank_of_stage),
            "num_microbatches": self.num_microbatches,
            "orders": [[str(action) for action in order] for order in self.orders],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Schedule:
        """Build a schedule from what :meth:`to_dict` returned.

        Raises PlanError for missing and unknown keys, values of a wrong type and malformed actions. Whether the
        schedule can run is for :func:`check_schedule` to say.
        """
        if not isinstance(fields, Mapping) or set(fields) != set(_KEYS):
            raise PlanError(f"a schedule is {_shorten(fields)}; give an object with the keys {', '.join(_KEYS)}")
        name, ranks, num_microbatches, orders = (fields[key] for key in _KEYS)
        if not isinstance(name, str):
            raise PlanError(f"the name of a schedule is {_shorten(name)}; give text such as '1f1b'")
        if not isinstance(ranks, list) or not all(rank == SPREAD or _is_count(rank) for rank in ranks):
            raise PlanError(f"rank_of_stage of a schedule is {_shorten(ranks)}; give a list with one rank per stage")
        if not isinstance(num_microbatches, int) or not _is_count(num_microbatches):
            raise PlanError(f"num_microbatches of a schedule is {_shorten(num_microbatches)}; give an int from 1")
        if not isinstance(orders, list) or not all(isinstance(order, list) for order in orders):
            raise PlanError(f"orders of a schedule is {_shorten(orders)}; give one list of actions per pipeline rank")
        return cls(name, tuple(ranks), num_microbatches, tuple(tuple(map(Action.parse, order)) for order in orders))

    def __str__(self) -> str:
        """Return a table: a row per rank, a column per time step, where F, I and W take one step and B two.

        ``.`` is an idle step and ``=`` the second half of a B. A rank that can never go on shows where it stands.
        """
        steps, blocked = _replay(self)
        cells = [
            Cell(str(action), _UNIT_STEPS[action.kind], self.ranks_of(action.stage), after)
            for action, _, _, after in steps
        ]
        stuck = {rank: f"stuck at {action}" for rank, action in blocked.items()}
        counts = {"rank": self.num_ranks, "stage": self.num_stages, "microbatch": self.num_microbatches}
        return render(self.name, counts, cells, stuck)


def stage_ranks(name: str, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage under schedule ``name``.

    One stage a rank in order; or looped (stage modulo ranks); or down and up again in a V. Raises PlanError for an
    unknown name, and when the schedule cannot place that many stages.
    """
    reason = _unplaceable(name, num_ranks, num_stages)
    if reason is not None:
        raise PlanError(reason)
    if name in _IN_A_V:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(stage % num_ranks for stage in range(num_stages))


def legal(name: str, num_ranks: int, num_stages: int, num_microbatches: int) -> str | None:
    """Return None if :func:`make_schedule` makes this schedule, else the reason and the remedy."""
    reason = _unplaceable(name, num_ranks, num_stages)
    if reason is not None:
        return reason
    if not _is_count(num_microbatches) or num_microbatches == 0:
        return f"{num_microbatches!r} microbatches; give an int from 1"
    if name == "dualpipev" and num_microbatches < num_stages:
        return (
            f"'dualpipev' wants at least as many microbatches as stages, and there are {num_microbatches} for "
            f"{num_stages} stages; give {num_stages} or more, or use 'zbv'"
        )
    rounds = max(1, num_microbatches // num_ranks)
    if name == "interleaved_1f1b" and num_microbatches % rounds:
        return (
            f"'interleaved_1f1b' goes through {num_microbatches} microbatches on {num_ranks} ranks in {rounds} rounds "
            f"and wants rounds of equal length; give {num_microbatches - num_microbatches % rounds} microbatches, or "
            f"any multiple of {num_ranks}"
        )
    return None


def make_schedule(name: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule ``name`` from torch's own order, overlapped pairs taken apart in order.

    Legal are, with P ranks, S stages and m micro-batches: ``gpipe``, ``1f1b``, ``zb_h1`` with S = P; ``zbv`` with
    S = 2 P; ``dualpipev`` with S = 2 P and m >= S; ``interleaved_1f1b`` with S = 2 P, 3 P, ... and m a multiple of
    max(1, m // P). This is as torch's classes, but that ``1f1b`` and ``zb_h1`` take any m. Keep the result where you
    need it often: it holds an object per action. Raises PlanError with the reason of :func:`legal`.
    """
    reason = legal(name, num_ranks, num_stages, num_microbatches)
    if reason is not None:
        raise PlanError(reason)
    from galvatron_fx.ir.torch_compat.pipelines import pipeline_orders

    orders = pipeline_orders(name, num_ranks, num_stages, num_microbatches)
    actions = tuple(tuple(Action(kind, stage, microbatch) for stage, kind, microbatch in order) for order in orders)
    return Schedule(name, stage_ranks(name, num_ranks, num_stages), num_microbatches, actions)


def check_schedule(schedule: Schedule) -> None:
    """Raise PlanError, naming rank, action and remedy, unless the schedule computes every gradient and ends.

    Wanted are, for every stage and micro-batch, one F and after it either one B, or one I and after it one W, all on
    the rank of the stage, or on every rank if all compute it together, in one order; and orders that do not wait for
    each other in a circle, where an F waits for the F of the stage before and a B or I for that of the stage behind.
    """
    _checked_steps(schedule)


def _checked_steps(schedule: Schedule) -> tuple[Step, ...]:
    _check_form(schedule)
    _check_pairs(schedule, _places(schedule))
    steps, blocked = _replay(schedule)
    if blocked:
        stuck = "; ".join(
            f"rank {rank} at {action}{_why_blocked(schedule, action)}" for rank, action in blocked.items()
        )
        raise PlanError(
            f"deadlock: no rank can go on, {stuck}; on each rank order the actions so that none comes before what it "
            f"waits for, or use make_schedule"
        )
    return tuple(steps)


def _check_form(schedule: Schedule) -> None:
    """Raise PlanError unless there are micro-batches, and every stage has a rank and every rank a stage."""
    if not _is_count(schedule.num_microbatches) or schedule.num_microbatches == 0:
        raise PlanError(f"a schedule of {schedule.num_microbatches!r} microbatches; give an int from 1")
    for stage, rank in enumerate(schedule.rank_of_stage):
        if rank != SPREAD and (not _is_count(rank) or rank >= schedule.num_ranks):
            raise PlanError(
                f"stage {stage} is on rank {rank!r} of a schedule with orders for {schedule.num_ranks} ranks; "
                f"mend rank_of_stage, or give an order for that rank"
            )
    idle = sorted(set(range(schedule.num_ranks)) - set(schedule.rank_of_stage))
    if idle or not schedule.orders:
        raise PlanError(f"ranks {idle} of {schedule.num_ranks} have no stage; give every pipeline rank at least one")


def _places(schedule: Schedule) -> dict[tuple[int, int, int], dict[str, int]]:
    """Return for every rank, stage and micro-batch where in the order of the rank the actions are, by kind.

    Raises PlanError for an action that does not exist, is on a wrong rank, or is there twice.
    """
    places: dict[tuple[int, int, int], dict[str, int]] = {}
    for rank, order in enumerate(schedule.orders):
        for place, action in enumerate(order):
            if action.stage >= schedule.num_stages or action.microbatch >= schedule.num_microbatches:
                raise PlanError(
                    f"rank {rank} has {action} in a schedule of {schedule.num_stages} stages and "
                    f"{schedule.num_microbatches} microbatches, both counted from 0; remove it"
                )
            if (owner := schedule.rank_of_stage[action.stage]) not in (rank, SPREAD):
                raise PlanError(f"rank {rank} has {action}, and stage {action.stage} is on rank {owner}; move it there")
            kinds = places.setdefault((rank, action.stage, action.microbatch), {})
            if action.kind in kinds:
                raise PlanError(f"rank {rank} has {action} twice, at {kinds[action.kind]} and {place}; remove one")
            kinds[action.kind] = place
    return places


def _check_pairs(schedule: Schedule, places: Mapping[tuple[int, int, int], dict[str, int]]) -> None:
    """Raise PlanError unless every stage and micro-batch has F and B, or F, I and W, in this order."""
    pairs = [(stage, rank) for stage in range(schedule.num_stages) for rank in schedule.ranks_of(stage)]
    for stage, rank in pairs:
        for microbatch in range(schedule.num_microbatches):
            kinds = places.get((rank, stage, microbatch), {})
            wanted = _wanted(rank, stage, microbatch, kinds)
            for first, then in pairwise(wanted):
                if kinds[first] > kinds[then]:
                    raise PlanError(
                        f"rank {rank} has {stage}{then}{microbatch} at {kinds[then]}, before {stage}{first}{microbatch}"
                        f" at {kinds[first]}; swap them"
                    )


def _wanted(rank: int, stage: int, microbatch: int, kinds: Mapping[str, int]) -> str:
    """Return the kinds that one stage and micro-batch needs; raises PlanError when they are not what it has."""
    if "B" in kinds and ("I" in kinds or "W" in kinds):
        other = "I" if "I" in kinds else "W"
        raise PlanError(
            f"rank {rank} has {stage}B{microbatch} together with {stage}{other}{microbatch}; keep B, or both I and W"
        )
    wanted = "FIW" if "I" in kinds or "W" in kinds else "FB"
    for kind in wanted:
        if kind not in kinds:
            instead = " (or I and W)" if kind == "B" else ""
            raise PlanError(f"rank {rank} lacks {stage}{kind}{microbatch}{instead}; add it to the order of the rank")
    return wanted


def _replay(schedule: Schedule) -> tuple[list[Step], dict[int, Action]]:
    """Run the orders as far as they go; also return the first action that is left on every rank that is stuck."""
    steps: list[Step] = []
    ended: dict[tuple[bool, int, int], int] = {}
    at = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            start = at[rank]
            while at[rank] < len(order):
                action = order[at[rank]]
                needed = _needed(schedule, action)
                after = ended.get(needed) if needed else 0
                owner = schedule.rank_of_stage[action.stage]
                if after is None or (owner == SPREAD and _absent(schedule, at, action)):
                    break
                steps.append(Step(action, owner, 4 * action.stage + KINDS.index(action.kind), after))
                if action.kind != "W":
                    ended[action.kind == "F", action.stage, action.microbatch] = len(steps)
                for together in schedule.ranks_of(action.stage):
                    at[together] += 1
            progress = progress or at[rank] > start
    orders = enumerate(schedule.orders)
    return steps, {rank: order[at[rank]] for rank, order in orders if at[rank] < len(order)}


def _absent(schedule: Schedule, at: Sequence[int], action: Action) -> list[int]:
    """Return the ranks whose order has something else, or nothing, where they stand."""
    return [rank for rank, order in enumerate(schedule.orders) if order[at[rank] : at[rank] + 1] != (action,)]


def _needed(schedule: Schedule, action: Action) -> tuple[bool, int, int] | None:
    """Return whether it is a forward, stage and micro-batch of what another stage has to end first, if anything."""
    if action.kind == "F":
        return (True, action.stage - 1, action.microbatch) if action.stage > 0 else None
    if action.kind == "W" or action.stage == schedule.num_stages - 1:
        return None
    return False, action.stage + 1, action.microbatch


def _why_blocked(schedule: Schedule, action: Action) -> str:
    if schedule.rank_of_stage[action.stage] == SPREAD:
        return " (all ranks compute it together)"
    needed = _needed(schedule, action)
    if needed is None:
        return ""
    forward, stage, microbatch = needed
    wanted = f"{stage}F{microbatch}" if forward else f"{stage}B{microbatch} or {stage}I{microbatch}"
    ranks = schedule.ranks_of(stage)
    return f" (waits for {wanted} on {f'rank {ranks[0]}' if len(ranks) == 1 else 'all ranks'})"


def _holdings(schedule: Schedule) -> list[dict[tuple[int, ...], None]]:
    """Return for each rank, as keys, the counts held by its stages just before each B or W that follows an F."""
    counts = [dict.fromkeys(schedule.stages_of(rank), 0) for rank in range(schedule.num_ranks)]
    holdings: list[dict[tuple[int, ...], None]] = [{} for _ in schedule.orders]
    grown = [False] * schedule.num_ranks
    for action, rank in ((a, rank) for a, _, _, _ in schedule.steps for rank in schedule.ranks_of(a.stage)):
        if action.kind == "F":
            counts[rank][action.stage] += 1
            grown[rank] = True
        elif action.kind != "I":
            if grown[rank]:
                holdings[rank][tuple(counts[rank].values())] = None
            counts[rank][action.stage] -= 1
            grown[rank] = False
    return holdings


def _unplaceable(name: str, num_ranks: int, num_stages: int) -> str | None:
    """Return why schedule ``name`` cannot place so many stages on so many ranks, or None."""
    if name == SEARCH:
        return "schedule 'search' is what plan(...) takes: it writes the table that it finds into the plan"
    if name not in SCHEDULES:
        return f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}"
    for what, count in (("pipeline ranks", num_ranks), ("stages", num_stages)):
        if not _is_count(count) or count == 0:
            return f"{count!r} {what}; give an int from 1"
    if name in _ONE_STAGE and num_stages != num_ranks:
        return f"'{name}' wants one stage a rank, and there are {num_stages} for {num_ranks}; give {num_ranks} stages"
    if name in _IN_A_V and num_stages != 2 * num_ranks:
        return (
            f"'{name}' wants two stages a rank, and there are {num_stages} for {num_ranks} ranks; give "
            f"{2 * num_ranks} stages"
        )
    if name == "interleaved_1f1b" and (num_stages % num_ranks or num_stages < 2 * num_ranks):
        return (
            f"'{name}' wants two or more stages a rank, as many on each, and there are {num_stages} for {num_ranks} "
            f"ranks; give {2 * num_ranks}, {3 * num_ranks}, ... stages, or use '1f1b'"
        )
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."

"""Ranks agree on a plan before anything runs, so that none waits for one that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import galvatron_fx
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan import Plan

__all__ = ["agreed", "together"]

T = TypeVar("T")


def agreed(
    prepare: Callable[[], T],
    choose: Callable[[T], Plan],
    check: Callable[[T, Plan], None],
    describe: Callable[[T], Mapping[str, str]],
    first_decides: bool,
) -> tuple[Plan, T]:
    """What ``prepare`` returns, and the plan that ``choose`` makes of it and ``check`` accepts, if every rank gets as
    far with an equal plan.

    ``describe``: what else has to be equal on all ranks, by what it is called; ``first_decides``: whether rank 0 alone
    chooses and tells the others: what ends by the clock ends differently on each. Raises the rank's own error, or
    PlanError naming the ranks that failed, or that have something else than rank 0, and what.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        prepared = prepare()
        plan = choose(prepared)
        check(prepared, plan)
        return plan, prepared
    error: Exception | None = None
    made: tuple[Plan, T] | None = None
    facts: dict[str, str] = {}
    own: list[T] = []
    try:
        own.append(prepare())
    except Exception as caught:
        error = caught
    if first_decides:
        choose = _told_by_first(choose, own)
    if error is None:
        try:
            plan = choose(own[0])
            check(own[0], plan)
            facts = {**_versions(), **describe(own[0]), "plan": plan.digest()}
            made = plan, own[0]
        except Exception as caught:
            error = caught
    _compare(facts, error)
    assert made is not None
    return made


def together(make: Callable[[], T]) -> T:
    """What ``make`` returns, if it returns on every rank: what only some ranks refuse would let the others wait.

    Raises the rank's own error, or PlanError naming one that failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    made: list[T] = []
    error: Exception | None = None
    try:
        made.append(make())
    except Exception as caught:
        error = caught
    _compare({}, error)
    return made[0]


def _told_by_first(choose: Callable[[T], Plan], own: list[T]) -> Callable[[T], Plan]:
    """What ``choose`` did on rank 0, told to all; every rank takes part, also one that failed (``own`` is empty)."""
    told: list[str | None] = [None]
    failed: list[Exception] = []
    plans: list[Plan] = []
    if dist.get_rank() == 0 and own:
        try:
            plans.append(choose(own[0]))
            told = [plans[0].to_json()]
        except Exception as caught:
            failed.append(caught)
    dist.broadcast_object_list(told)

    def taken(_: T) -> Plan:
        if failed:
            raise failed[0]
        if told[0] is None:
            raise PlanError("rank 0, which searches for all, has found no plan: see its error")
        return plans[0] if plans else Plan.from_json(told[0])

    return taken


def _versions() -> dict[str, str]:
    return {"version of torch": torch.__version__, "version of galvatron_fx": galvatron_fx.__version__}


def _compare(facts: Mapping[str, str], error: Exception | None) -> None:
    """Raise unless every rank has come as far with equal facts; ``error``: why this rank has not."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, facts if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, told in enumerate(heard):
        if isinstance(told, str):
            raise PlanError(f"rank {rank} could not compile, so no rank starts: {told}")
    for what, value in heard[0].items():
        others = [rank for rank, told in enumerate(heard) if told[what] != value]
        if others:
            found = heard[others[0]][what]
            raise PlanError(
                f"ranks {others} hold another {what} than rank 0 ({found}, and {value}): give all ranks the same "
                f"libraries, model, inputs, options and plan file"
            )

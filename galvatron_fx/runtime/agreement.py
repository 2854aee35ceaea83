"""Ranks agree on a plan before anything runs, so that none waits for one that failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx import _version
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.runtime.decided_inputs import GATHER
from galvatron_fx.runtime.members import Members

__all__ = ["agreed", "from_first_rank", "require_all_ranks", "require_equal", "together"]

T = TypeVar("T")
Plans = tuple[Plan, ...]
Facts = Mapping[str, str | Sequence[str]]
"""What has to be equal on all ranks, by what it is called: a text, or several of which the first unlike one is told."""


def agreed(
    prepare: Callable[[], T],
    choose: Callable[[T], Plans],
    check: Callable[[T, Plan], None],
    describe: Callable[[T], Facts],
    call: Callable[[], Facts],
    first_decides: bool,
) -> tuple[Plans, T]:
    """What ``prepare`` returns, and the plans that ``choose`` makes of it and ``check`` accepts, if every rank gets as
    far with equal plans.

    ``describe`` and ``call``: what else has to be equal on all ranks, the latter before anything is prepared;
    ``first_decides``: whether rank 0 alone chooses and tells the others: what ends by the clock ends differently on
    each. Raises the rank's own error, or PlanError naming the ranks that failed, or that have something else than rank
    0, and what.
    """
    members = Members.every()
    if members.size == 1:
        prepared = prepare()
        plans = choose(prepared)
        for plan in plans:
            check(prepared, plan)
        return plans, prepared
    _compare({**call(), **_libraries()}, None, members)
    error: Exception | None = None
    outcome: tuple[Plans, T] | None = None
    facts: Facts = {}
    preparations: list[T] = []
    try:
        preparations.append(prepare())
    except Exception as caught:
        error = caught
    if first_decides:
        choose = _choice_of_first_rank(choose, preparations)
    if error is None:
        try:
            plans = choose(preparations[0])
            for plan in plans:
                check(preparations[0], plan)
            facts = {**describe(preparations[0]), "plan": [plan.digest() for plan in plans]}
            outcome = plans, preparations[0]
        except Exception as caught:
            error = caught
    _compare(facts, error, members)
    assert outcome is not None
    return outcome


def require_equal(facts: Facts) -> None:
    """Raise PlanError, on every rank of the job that calls it, unless all have equal ``facts``."""
    _compare(facts, None, Members.every())


def from_first_rank(text: str) -> str:
    """Rank 0's text. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    texts = [text]
    dist.broadcast_object_list(texts)
    return texts[0]


def together(make: Callable[[], T], members: Members | None = None) -> T:
    """What ``make`` returns, if it returns on every rank: what only some ranks refuse would let the others wait.

    ``members``: the ranks that call it, by default all of the job.

    Raises the rank's own error, or PlanError naming one that failed.
    """
    members = Members.every() if members is None else members
    if members.size == 1:
        return make()
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(make())
    except Exception as caught:
        error = caught
    _compare({}, error, members)
    return results[0]


def _choice_of_first_rank(choose: Callable[[T], Plans], own: list[T]) -> Callable[[T], Plans]:
    """What ``choose`` did on rank 0, told to all; every rank takes part, also one that failed (``own`` is empty)."""
    plan_texts: list[list[str]] = [[]]
    failed: list[Exception] = []
    plans: list[Plan] = []
    if dist.get_rank() == 0 and own:
        try:
            plans += choose(own[0])
            plan_texts = [[plan.to_json() for plan in plans]]
        except Exception as caught:
            failed.append(caught)
    dist.broadcast_object_list(plan_texts)

    def taken(_: T) -> Plans:
        if failed:
            raise failed[0]
        if not plan_texts[0]:
            raise PlanError("rank 0, which searches for all, has found no plan: see its error")
        return tuple(plans) or tuple(map(Plan.from_json, plan_texts[0]))

    return taken


def require_all_ranks(mesh: DeviceMesh) -> None:
    """Refuse a mesh over some of the ranks. Raises InputError at once, on every rank that calls it."""
    members = sorted(mesh.mesh.flatten().tolist())
    size = dist.get_world_size() if dist.is_initialized() else 1
    if len(members) == size or not dist.is_initialized():
        return
    shown = f"{members[:8]}"[:-1] + (", ...]" if len(members) > 8 else "]")
    raise InputError(
        f"the mesh has the ranks {shown}, {len(members)} of {size}: pass the mesh over all ranks; what its axes do is "
        f"said by roles=, constraints= or plan=. To train on some ranks only, start a job of these alone"
    )


def _libraries() -> dict[str, str]:
    return {
        "version of torch": torch.__version__,
        "version of galvatron_fx": _version.__version__,
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
    }


def _remedy(what: str, facts: Facts) -> str:
    if what == "batch" and facts.get("batch=") == "local":
        return (
            f"with batch='local' they bring tensors of the same shapes: pad samples to one length; where they have "
            f"unlike numbers of rows, as packed images, {GATHER}"
        )
    return "give all ranks the same libraries, model, inputs, options and plan file"


def _compare(facts: Facts, error: Exception | None, members: Members) -> None:
    """Raise unless every rank has come as far with equal facts; ``error``: why this rank has not."""
    sums = {what: hashlib.sha256(repr(value).encode()).digest() for what, value in facts.items()}
    heard: list[Any] = members.all(sums if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, answer in zip(members.ranks, heard, strict=True):
        if isinstance(answer, str):
            raise PlanError(f"rank {rank} could not compile, so no rank starts: {answer}")
    for what in heard[0]:
        others = [rank for rank, answer in enumerate(heard) if answer.get(what) != heard[0][what]]
        if others:
            values = members.all(facts.get(what, "none"))
            theirs, first = _first_unlike(values[others[0]], values[0])
            raise PlanError(
                f"ranks {members.named(others)} hold another {what} than rank {members.ranks[0]} ({theirs}, and "
                f"{first}): {_remedy(what, facts)}"
            )


def _first_unlike(one: str | Sequence[str], other: str | Sequence[str]) -> tuple[str, str]:
    if isinstance(one, str) or isinstance(other, str):
        return str(one), str(other)
    return next(pair for pair in zip_longest(one, other, fillvalue="nothing") if pair[0] != pair[1])

"""Torch's pipeline schedules: orders of work, actions, the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["pipeline_orders", "pipeline_runtime", "runtime_actions", "take_over_sends"]


def pipeline_orders(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[tuple[int, str, int]]]:
    """Return what torch's schedule lets each pipeline rank compute: stage, kind (F, B, I or W) and micro-batch.

    No processes, process groups or stages are made: torch's methods get an object with the few numbers that they
    read. ``name`` is one of ``galvatron_fx.ir.plan.schedule.SCHEDULES``, whose limits the caller has checked.
    ``Schedule1F1B._get_pipeline_order`` of torch 2.13 counts the forwards of the last rank from 1, so 1F1B comes from
    the function that the interleaved schedules share.
    """
    from torch.distributed.pipelining import schedules  # slow to import, and only pipelines need it

    rounds = max(1, num_microbatches // num_ranks)
    known: Any = SimpleNamespace(
        _n_microbatches=num_microbatches,
        _num_stages=num_stages,
        num_stages=num_stages,
        pp_group_size=num_ranks,
        n_local_stages=num_stages // num_ranks,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    if name == "gpipe":
        table: Any = schedules.ScheduleGPipe._get_pipeline_order(known)
        return [_compute_actions(table[rank]) for rank in range(num_ranks)]
    if name == "1f1b":
        return [_compute_actions(_one_forward_one_backward(known, rank)) for rank in range(num_ranks)]
    owner: Any = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "zb_h1": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    return [_compute_actions(owner._calculate_single_rank_operations(known, rank)) for rank in range(num_ranks)]


def _one_forward_one_backward(known: Any, rank: int) -> list[Any]:
    """Return torch's 1F1B order of ``rank`` with one stage a rank, bubbles included."""
    from torch.distributed.pipelining import schedules

    count, ranks = known._n_microbatches, known.pp_group_size
    warmup = schedules._get_warmup_ops(rank, 1, known.microbatches_per_round, ranks, count, multiply_factor=1)
    return list(
        schedules._get_1f1b_rank_ops(1, ranks, warmup, count - warmup, warmup, rank, lambda _: rank, lambda _: rank)
    )


def _compute_actions(order: Iterable[Any]) -> list[tuple[int, str, int]]:
    """Drop bubbles and gradient reductions from an order of torch, and take overlapped pairs apart."""
    flat = (part for action in order if action is not None for part in (action.sub_actions or (action,)))
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in flat if a.is_compute_op]


def pipeline_runtime() -> type:
    """The class of torch's runtime for pipeline schedules."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime


def take_over_sends(runtime: Any, ahead: Callable[[int, int], None], back: Callable[[int, int], None]) -> None:
    """Have ``runtime`` call these two, with stage and micro-batch, where it would send and keep what it sends.

    ``register_custom_function`` is for computing, and refuses sends. From 2.15 on, the runtime wants an action that
    waits for each of its own sends.
    """
    from torch.distributed.pipelining import schedules

    for kind, send in ((schedules.SEND_F, ahead), (schedules.SEND_B, back)):
        runtime._comp_type_to_function_map[kind] = lambda action, _, send=send: send(
            action.stage_index, action.microbatch_index
        )


def runtime_actions(rows: Sequence[Sequence[tuple[int, str, int]]]) -> dict[int, list[Any]]:
    """Torch's actions by rank, for rows of (stage, kind, micro-batch), transfers such as SEND_F among them."""
    from torch.distributed.pipelining import schedules

    kinds = {str(kind.value): kind for kind in schedules._ComputationType}
    return {
        rank: [schedules._Action(stage, kinds[kind], microbatch) for stage, kind, microbatch in order]
        for rank, order in enumerate(rows)
    }

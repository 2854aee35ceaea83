"""Run by test_ranks.py: ranks that come with unlike weights, batches, flags, options and meshes."""

from __future__ import annotations

import sys
from functools import partial

from galvatron_fx import Plan
from tests.models import zoo
from tests.passes.frontend.test_follow_batch import Words
from tests.passes.frontend.test_follow_batch import batch as pictures
from tests.runtime.launch import Check, fork_checks, runs
from tests.runtime.shared_lowerings import compile_before_the_fork
from tests.seams.unlike_batches import (
    batches_put_together,
    local_batches,
    local_plan,
    local_refusals,
    local_without_inputs,
    other_rows,
    other_rows_as_own,
    other_rows_later,
    other_values_decide,
    text,
    unlike_partners,
)
from tests.seams.unlike_model import batch, model_of
from tests.seams.unlike_options import part_of_the_ranks, passes_of_the_users, unlike_options
from tests.seams.unlike_weights import (
    another_buffer,
    another_seed,
    changed_after_compile,
    changed_later,
    lazily_and_again,
    only_first_has_weights,
    same_weights_are_not_sent,
    staged,
    swapped_values,
)

LOCAL = {
    2: [("data",), ("zero",), ("tensor",), ("sequence",), ("pipeline",)],
    4: [("data", "tensor"), ("pipeline", "zero")],
}
WEIGHTS: dict[str, Check] = {
    **{f"another_seed_{role}": partial(another_seed, role) for role in ("data", "zero", "tensor")},
    "another_buffer": another_buffer,
    "swapped_values": swapped_values,
    "same_weights": same_weights_are_not_sent,
    "staged": staged,
    "lazily_and_again": lazily_and_again,
    "changed_after_compile": changed_after_compile,
    "changed_later": changed_later,
    "only_first_has_weights": only_first_has_weights,
    "unlike_options": unlike_options,
    "passes_of_the_users": passes_of_the_users,
}
BATCHES: dict[str, Check] = {
    **{f"other_rows_{role}": partial(other_rows, role) for role in ("data", "tensor")},
    "other_rows_later": other_rows_later,
    "other_rows_as_own": other_rows_as_own,
    "other_values_decide": other_values_decide,
    "batches_put_together": batches_put_together,
    **{f"local_{roles[0]}": partial(local_batches, roles) for roles in LOCAL[2]},
    "local_without_inputs": local_without_inputs,
    "local_refusals": local_refusals,
}
ON_FOUR: dict[str, Check] = {
    "part_of_the_ranks": part_of_the_ranks,
    "unlike_partners": unlike_partners,
    **{f"local_{'_'.join(roles)}": partial(local_batches, roles) for roles in LOCAL[4]},
}
CHECKS: dict[int, dict[str, Check]] = {2: WEIGHTS | BATCHES, 4: ON_FOUR}


def prepare(ranks: int) -> None:
    """Capture and lower for all ranks."""
    model, inputs = zoo.llama(layers=1)
    for roles in (roles for roles in LOCAL[ranks] if runs(f"local_{'_'.join(roles)}")):
        plan = local_plan(roles)
        compile_before_the_fork(plan.axis_sizes, [(model, text(inputs, 0, 4 * ranks, 3), [plan])])
    counts = {"data": 7, "zero": 4, "tensor": 6} if ranks == 2 else {}
    plans = [Plan.uniform((2,), (role,)) for role, count in counts.items() for _ in range(count)]
    compile_before_the_fork((2,), [(model_of(), batch(), plans)])
    if ranks == 2:
        given = dict(zip(("ids", "patches", "sizes"), pictures(), strict=True))
        compile_before_the_fork((2,), [(Words().double(), given, [Plan.uniform((2,), ("zero",))])])


def main() -> None:
    """Run the checks of every number of ranks, or those named."""
    for ranks in CHECKS:
        fork_checks((ranks,), CHECKS[ranks], sys.argv[1:], partial(prepare, ranks))


if __name__ == "__main__":
    main()

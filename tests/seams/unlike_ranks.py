"""Run by test_ranks.py: ranks that come with unlike weights, batches, flags, options and meshes."""

from __future__ import annotations

import sys
from functools import partial

import galvatron_fx
from tests.models import zoo
from tests.runtime.launch import Check, fork_checks
from tests.seams.unlike_batches import (
    local_batches,
    local_refusals,
    local_without_inputs,
    other_rows,
    other_rows_as_own,
    other_rows_later,
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
    **{f"local_{role}": partial(local_batches, (role,)) for role in ("data", "zero", "tensor", "sequence", "pipeline")},
    "local_without_inputs": local_without_inputs,
    "local_refusals": local_refusals,
}
ON_FOUR: dict[str, Check] = {
    "part_of_the_ranks": part_of_the_ranks,
    "unlike_partners": unlike_partners,
    "local_data_tensor": partial(local_batches, ("data", "tensor")),
    "local_pipeline_zero": partial(local_batches, ("pipeline", "zero")),
}
CHECKS: dict[int, dict[str, Check]] = {2: WEIGHTS | BATCHES, 4: ON_FOUR}


def capture_models(ranks: int) -> None:
    """Those of all checks, for their batches."""
    galvatron_fx.capture(model_of(), batch())
    for layers in (1, 2):
        model, inputs = zoo.llama(layers)
        galvatron_fx.capture(model, text(inputs, 0, 4 * ranks, 3))


def main() -> None:
    """Run the checks of every number of ranks, or those named."""
    for ranks in CHECKS:
        fork_checks((ranks,), CHECKS[ranks], sys.argv[1:], partial(capture_models, ranks))


if __name__ == "__main__":
    main()

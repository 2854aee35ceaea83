"""Pins that cannot be are refused with the reason and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.configurations import Configurations, Pins
from passes.search.solvers.stage_search import Configuration
from tests.helpers import DEVICE, axes
from tests.passes.search.small_models import listed

WITHOUT_STAGES = ("data", "zero", "tensor")


def configurations(
    *,
    sizes: tuple[int, ...] = (2, 2, 2),
    roles: tuple[str, ...] = ROLES,
    batch: int = 16,
    blocks: int = 6,
    with_weights: int | None = None,
    **pins: Any,
) -> list[Configuration]:
    cluster = Cluster(DEVICE, axes(sizes))
    return listed(Configurations(cluster, roles, Pins(**pins), batch, blocks, with_weights=with_weights))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_stages": 8}, "num_stages=8 for a model of 6 blocks, .* use at most 4 .* mesh of 2×2×2"),
        (
            {"num_stages": 4, "schedule": "1f1b", "with_weights": 3},
            "6 blocks, of which 3 have parameters, and every pipeline rank needs",
        ),
        ({"num_stages": 3}, "num_stages=3 cannot be formed .* mesh of 2×2×2; possible: 1, 2, 4$"),
        ({"num_stages": 2, "schedule": "zbv"}, "under schedule 'zbv'; possible: 4$"),
        ({"num_stages": 2, "sizes": (3, 2)}, "mesh of 3×2; possible: 1, 3, 6$"),
        ({"schedule": "zbv", "blocks": 3}, "no number of stages under schedule 'zbv' .* model of 3 blocks"),
        ({"schedule": "zbv", "roles": WITHOUT_STAGES}, "'zbv' needs stages: add 'pipeline' to the roles"),
        ({"schedule": "pipedream"}, "unknown schedule 'pipedream': use one of gpipe, 1f1b"),
        ({"num_microbatches": 5}, "5 micro-batches do not divide a batch of 16: .* such as 4 or 8$"),
        ({"num_microbatches": 40}, "such as 16$"),
        (
            {"num_stages": 4, "num_microbatches": 2, "schedule": "dualpipev"},
            "num_stages=4, num_microbatches=2, schedule='dualpipev' cannot run .* at least as many microbatches",
        ),
        (
            {"num_stages": 6, "num_microbatches": 16, "schedule": "interleaved_1f1b", "sizes": (3,)},
            "rounds of equal length; give 15",
        ),
        ({"vocabulary": "spread", "roles": WITHOUT_STAGES}, "vocabulary='spread' needs stages: add 'pipeline'"),
        ({"vocabulary": "spread", "blocks": 3}, r"no number of stages between two blocks .* model of 3 blocks"),
        ({"vocabulary": "spread", "num_stages": 1}, "num_stages=1 cannot be formed .* possible: 2, 4$"),
        ({"num_stages": 0}, "num_stages is 0; give an int from 1"),
        ({"num_microbatches": True}, "num_microbatches is True; give an int from 1"),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        configurations(**options)


def test_what_is_pinned_is_all_that_is_tried() -> None:
    found = configurations(num_stages=4, num_microbatches=8, schedule="zb_h1")
    assert found == [Configuration(2, 4, "zb_h1", 8)]
    assert {c.num_stages for c in configurations()} == {1, 2, 4}
    assert {(c.pipeline_axes, c.num_stages) for c in configurations(roles=WITHOUT_STAGES)} == {(0, 1)}
    assert {c.num_microbatches for c in configurations(num_stages=1)} == {1, 2, 4, 8, 16}


def test_stages_of_many_schedules_have_one_meaning() -> None:
    """Four stages: one a rank on four, or two a rank on two."""
    found = {(c.pipeline_axes, c.schedule) for c in configurations(num_stages=4)}
    assert found == {(2, "1f1b"), (2, "zb_h1"), (1, "interleaved_1f1b"), (1, "zbv")}


def test_ranks_take_as_many_stages_in_turns_as_are_pinned() -> None:
    """Six stages: three a rank on two; two a rank where nothing is pinned."""
    pinned = configurations(num_stages=6, num_microbatches=8, schedule="interleaved_1f1b")
    assert pinned == [Configuration(1, 6, "interleaved_1f1b", 8)]
    assert {c.num_stages for c in configurations(schedule="interleaved_1f1b")} == {4}


def test_small_batches_leave_ranks_idle_rather_than_no_plan() -> None:
    """A batch of 3 has no number of micro-batches that keeps four ranks busy."""
    assert {c.num_microbatches for c in configurations(num_stages=4, batch=3, schedule="1f1b")} == {1, 3}


def test_what_has_no_loss_is_cut_by_pins_alone() -> None:
    def settings(**pins: Any) -> list[Configuration]:
        return listed(Configurations(Cluster(DEVICE, axes((2, 2))), ROLES, Pins(**pins), 16, 6, has_loss=False))

    assert settings() == [Configuration(0, 1, "1f1b", 1)]
    assert {c.num_stages for c in settings(num_stages=2)} == {2}

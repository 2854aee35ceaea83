"""How long ranks wait for each other in a collective, by how long they have computed before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from galvatron_fx.ir.overlap import Skew
from galvatron_fx.profiling.collectives import Group
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.timing import Rounds, Task
from passes.codegen import finished

__all__ = ["fit_skew", "measure_skew"]

_COMPUTED_S = (2e-3, 8e-3, 32e-3, 128e-3)  # before a collective: a layer's part of a step, up to most of one
_GROWTH = 0.45  # as :class:`Skew` says
_WINDOW_S = 0.1  # of one measurement: several collectives with what is computed before them
_ROUNDS, _SHORT_S = 8, 1e-3  # so many rounds, however long they take
_WIDTH = 96  # of the square products that are computed

c10d = torch.ops._c10d_functional


def measure_skew(ranks: Ranks, groups: Sequence[Group]) -> Skew:
    """Compute and all-reduce a few bytes over all ranks by turns; none for one rank."""
    if not groups:
        return Skew()
    name, matrix = groups[-1].handle.group_name, torch.ones(_WIDTH, _WIDTH, device=ranks.device_type)
    one = torch.ones(1, device=ranks.device_type)

    def turns(products: int, sends: bool) -> Task:
        def run(times: int) -> None:
            for _ in range(times):
                for _ in range(products):
                    matrix @ matrix
                if sends:
                    finished(c10d.all_reduce(one, "sum", name))

        return lambda: run

    product_s = _timed(ranks, [turns(1, False)])[0]
    counts = [max(1, round(ranks.first(computed_s / product_s))) for computed_s in _COMPUTED_S]
    tasks = [turns(0, True), *(turns(count, sends) for count in counts for sends in (False, True))]
    sent_s, *both = _timed(ranks, tasks)
    late = [together - alone - sent_s for alone, together in zip(both[::2], both[1::2], strict=True)]
    return fit_skew([count * product_s for count in counts], late)


def fit_skew(computed_s: Sequence[float], late_s: Sequence[float]) -> Skew:
    """The curve of the usual growth through measured delays, by least squares, in which those after short computing
    count as much. One number is all that a few noisy delays can tell.
    """
    computed = np.array(computed_s)
    weights = 1 / np.sqrt(computed)
    shape = computed**_GROWTH * weights
    height = float(shape @ (np.array(late_s) * weights) / (shape @ shape))
    return Skew(height, _GROWTH) if height > 0 else Skew()


def _timed(ranks: Ranks, tasks: Sequence[Task]) -> list[float]:
    return Rounds(ranks, tasks, _WINDOW_S).run(_SHORT_S, _ROUNDS, lambda share: None)

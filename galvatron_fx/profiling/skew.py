"""How long ranks wait for each other in a collective, by how long they have computed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from galvatron_fx.ir.cluster.overlap import Skew
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.profiling.collectives import Group
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.timing import COMPUTED_S, Call, Rounds, Task, Turns, mean_without_worst, some_products

__all__ = ["fit_skew", "measure_skew"]

_COMPUTED_S = (4e-3, 12e-3, 40e-3, 128e-3)  # before a collective: a layer's part of a step, up to most of one
_GROWTH = 0.45  # as :class:`Skew` says
_WINDOW_S = 0.1  # of one measurement: several collectives with what is computed before them
_ROUNDS, _SENT_TURNS, _SHORT_S = 8, 100, 1e-3  # so many rounds and turns, however long they take

c10d = torch.ops._c10d_functional


def measure_skew(ranks: Ranks, groups: Sequence[Group]) -> Skew:
    """Compute and all-reduce a few bytes over all ranks by turns; none for one rank.

    It is what comes on top of the collective on the last rank to begin.
    """
    if not groups:
        return Skew()
    name = groups[-1].handle.group_name
    one = torch.zeros(1, device=ranks.device_type)

    def send() -> Tensor:
        return finished(c10d.all_reduce_(one, "sum", name))

    def turns(compute: Callable[[], None], sends: bool) -> Task:
        def run(times: int) -> None:
            for _ in range(times):
                compute()
                if sends:
                    send()

        return lambda: run

    clock = Turns(ranks, [Call(some_products(ranks, COMPUTED_S), send, 0)], usual=mean_without_worst)
    sent_s = clock.run(_SHORT_S, _SENT_TURNS, lambda share: None)[0]
    computed = [some_products(ranks, seconds) for seconds in _COMPUTED_S]
    tasks = [turns(compute, sends) for compute in computed for sends in (False, True)]
    times = Rounds(ranks, tasks, _WINDOW_S).run(_SHORT_S, _ROUNDS, lambda share: None)
    late = [together - alone - sent_s for alone, together in zip(times[::2], times[1::2], strict=True)]
    return fit_skew(times[::2], late)


def fit_skew(computed_s: Sequence[float], late_s: Sequence[float]) -> Skew:
    """The curve of the usual growth through measured delays, by least squares, in which those after short computing
    count as much. One number is all that a few noisy delays can tell.
    """
    computed = np.array(computed_s)
    weights = 1 / np.sqrt(computed)
    shape = computed**_GROWTH * weights
    height = float(shape @ (np.array(late_s) * weights) / (shape @ shape))
    return Skew(height, _GROWTH) if height > 0 else Skew()

"""How much computing and communicating slow each other down, and ranks that share cores each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.profiling.collectives import Group
from galvatron_fx.profiling.ranks import Ranks

__all__ = ["measure_overlap", "measure_sharing", "slowdowns"]

_ROUNDS = 25
_SHARING_ROUNDS = 15
_WIDTH = 384  # of square products: 0.1 GFLOP each
_PRODUCTS = 20
_SHARING_PRODUCTS = 80  # as long as most of a step: in shorter work, ranks that end first leave the others their cores
_COLLECTIVE_BYTES = 4 * 2**20
_COLLECTIVES = 4
_LEAST_BESIDE = 0.05  # of communicating, that is taken to have been done beside computing

c10d = torch.ops._c10d_functional


def measure_sharing(ranks: Ranks) -> dict[int, float]:
    """Seconds of computing by the number of ranks that do it at once, relative to all of them; {} for one rank.

    1.0 throughout where every rank has a device of its own. Counts are the divisors of the number of ranks: those of
    the stages of a pipeline that compute while the others wait.
    """
    if ranks.count == 1:
        return {}
    compute = _products(ranks.device_type, _SHARING_PRODUCTS)
    counts = [count for count in range(1, ranks.count + 1) if ranks.count % count == 0]
    rounds = [[_busy_s(ranks, compute, count) for count in counts] for _ in range(_SHARING_ROUNDS)]
    times = [median(column) for column in zip(*rounds, strict=True)]
    # More ranks at once are never taken to be faster: what one finds so is noise.
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    return {count: spent / times[-1] for count, spent in zip(counts, times, strict=True)}


def _busy_s(ranks: Ranks, compute: Callable[[], None], count: int) -> float:
    """Mean seconds of ``compute`` on ``count`` ranks, spread over the mesh, while the others wait."""
    busy = ranks.index % (ranks.count // count) == 0
    ranks.together()
    start_s = ranks.clock_s()
    if busy:
        compute()
    spent_s = ranks.clock_s() - start_s if busy else 0.0
    return ranks.sum([spent_s])[0] / count


def measure_overlap(ranks: Ranks, groups: Sequence[Group]) -> Overlap:
    """Run products and all-reduces alone and at once; 1.0 each for one rank."""
    if not groups:
        return Overlap()
    compute = _products(ranks.device_type, _PRODUCTS)
    start, issue = (_all_reduces(ranks.device_type, groups[-1], size) for size in (4, _COLLECTIVE_BYTES))
    slower = [_slowdowns(ranks, compute, start, issue) for _ in range(_ROUNDS)]
    compute_s, communication_s = (max(1.0, median(column)) for column in zip(*slower, strict=True))
    both = ranks.mean([compute_s, communication_s])
    return Overlap(both[0], both[1])


def _slowdowns(
    ranks: Ranks,
    compute: Callable[[], None],
    start: Callable[[], list[torch.Tensor]],
    issue: Callable[[], list[torch.Tensor]],
) -> tuple[float, float]:
    """What :func:`slowdowns` makes of one round."""
    compute_s, start_s, communicate_s = (
        _timed(ranks, act) for act in (compute, lambda: _wait(start()), lambda: _wait(issue()))
    )
    ranks.together()
    begun_s = ranks.clock_s()
    pending = issue()
    compute()
    computed_s = ranks.clock_s() - begun_s
    _wait(pending)
    return slowdowns(compute_s, start_s, communicate_s, computed_s, ranks.clock_s() - begun_s)


def slowdowns(
    compute_s: float, start_s: float, communicate_s: float, computed_s: float, communicated_s: float
) -> tuple[float, float]:
    """(computing, communicating): how many times longer each takes while the other runs.

    Alone they take ``compute_s`` and ``communicate_s``, of which ``start_s`` to start, which is not slowed down. When
    both begin at once, they have ended after ``computed_s`` and, at that moment or later, ``communicated_s``.
    """
    send_s = max(communicate_s - start_s, 1e-9)
    beside_s = max(send_s - (communicated_s - computed_s), _LEAST_BESIDE * send_s)
    return computed_s / max(compute_s, 1e-9), (computed_s - start_s) / beside_s


def _timed(ranks: Ranks, act: Callable[[], None]) -> float:
    ranks.together()
    start_s = ranks.clock_s()
    act()
    return ranks.clock_s() - start_s


def _products(device: str, count: int) -> Callable[[], None]:
    left, right = (torch.ones(_WIDTH, _WIDTH, dtype=torch.float32, device=device) for _ in range(2))

    def run() -> None:
        for _ in range(count):
            left @ right

    run()
    return run


def _all_reduces(device: str, group: Group, size_bytes: int) -> Callable[[], list[torch.Tensor]]:
    tensors = [torch.ones(size_bytes // 4, dtype=torch.float32, device=device) for _ in range(_COLLECTIVES)]
    return lambda: [c10d.all_reduce(tensor, "sum", group.handle.group_name) for tensor in tensors]


def _wait(pending: Sequence[torch.Tensor]) -> None:
    for tensor in pending:
        finished(tensor)

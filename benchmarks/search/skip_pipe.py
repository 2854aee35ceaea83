"""Claim: none of ours; what pipelines gain whose micro-batches skip stages, by simulation on a given cluster.

SkipPipe (Blagoev, Chen & Ersoy 2025, arXiv:2502.19913) lets each micro-batch leave out some stages, all of them equally
often but for the first, and schedules the paths so that micro-batches meet little. That is another function than the
model's, so no plan of ours does it. Here equal stages lie one on each machine of a cluster; a path table says which
stages each micro-batch visits, in ascending order. Compares all stages, stages skipped in turns, and path tables found
by local search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TypeVar

from rich.console import Console
from rich.table import Table

import galvatron_fx as gfx
from benchmarks.common import machine
from galvatron_fx.ir.cluster.nodes import Nodes
from galvatron_fx.ir.plan.units import format_seconds

Path = tuple[int, ...]
Choice = TypeVar("Choice")

PARAMETERS, WIDTH, TOKENS = 8.03e9, 4096, 4096  # of LLaMA-3-8B, and of a micro-batch of one sample
REGIONS = (0, 1, 0, 2, 1, 0, 2, 1)  # of eight machines of one device, as they joined
FAST, SLOW = (1e-3, 1.25e9), (50e-3, 0.125e9)  # inside of a region and between: seconds, bytes a second


def in_regions() -> gfx.Cluster:
    """One A100 a machine."""
    links = [[FAST if one == other else SLOW for other in REGIONS] for one in REGIONS]
    latency, bandwidth = ([[link[part] for link in row] for row in links] for part in range(2))
    machines = [("A100-80GB", 1)] * len(REGIONS)
    return gfx.Cluster.from_nodes(machines, latency_s=latency, bandwidth_bytes_per_s=bandwidth)


@dataclass(frozen=True)
class Pipeline:
    """Equal stages: seconds of a forward, of which a backward takes two; ``send_s[a][b]``: from stage to stage."""

    forward_s: float
    send_s: Sequence[Sequence[float]]

    @classmethod
    def of(cls, nodes: Nodes, order: Sequence[int]) -> Pipeline:
        """LLaMA-3-8B, stage by stage on the nodes in that order."""
        device, size_bytes = nodes.nodes[0].device, 2.0 * TOKENS * WIDTH
        rate = dict(device.peak_flops)["bfloat16"] * device.matmul_efficiency
        send_s = [
            [nodes.latency_s[a][b] + size_bytes / nodes.bandwidth_bytes_per_s[a][b] for b in order] for a in order
        ]
        return cls(2 * PARAMETERS / len(order) * TOKENS / rate, send_s)

    @property
    def num_stages(self) -> int:
        """Stages, and machines."""
        return len(self.send_s)

    def step_s(self, paths: Sequence[Path]) -> float:
        """Seconds until all micro-batches went their paths forth and back."""
        return _Run(self, paths).until_done_s()


@dataclass
class _Run:
    """A machine takes backwards first, then the micro-batch that began first; it holds no more micro-batches than there
    are stages. Messages travel beside computing, and one after the other from one machine to another.
    """

    pipeline: Pipeline
    paths: Sequence[Path]
    events: list[tuple[float, int, int, int]] = field(default_factory=list)  # when what comes to which place of a walk
    _number: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        stages = self.pipeline.num_stages
        self.walks = [(*path, *reversed(path)) for path in self.paths]
        self.free_s, self.held = [0.0] * stages, [0] * stages
        self.ready: list[list[tuple[bool, int, int]]] = [[] for _ in range(stages)]
        self.sent_s: dict[tuple[int, int], float] = {}

    def until_done_s(self) -> float:
        """Run all events."""
        for part in range(len(self.paths)):
            self._come(0.0, part, 0)
        while self.events:
            now_s, _, part, place = heappop(self.events)
            if place >= 0:
                heappush(self.ready[self.walks[part][place]], (place < len(self.paths[part]), part, place))
            if self.events and self.events[0][0] == now_s:
                continue  # what comes at the same time is chosen among
            for stage in range(self.pipeline.num_stages):
                self._begin(stage, now_s)
        assert not any(self.ready), "every micro-batch comes home"
        return max(self.free_s)

    def _come(self, when_s: float, part: int, place: int) -> None:
        heappush(self.events, (when_s, next(self._number), part, place))

    def _begin(self, stage: int, now_s: float) -> None:
        """Let a machine that is free take what is ready."""
        if self.free_s[stage] > now_s or not self.ready[stage]:
            return
        is_forward, part, place = self.ready[stage][0]
        if is_forward and self.held[stage] >= self.pipeline.num_stages:
            return
        heappop(self.ready[stage])
        self.held[stage] += 1 if is_forward else -1
        done_s = self.free_s[stage] = now_s + self.pipeline.forward_s * (1 if is_forward else 2)
        self._come(done_s, part, -1)
        if place + 1 < len(self.walks[part]):
            following = self.walks[part][place + 1]
            there_s = done_s
            if following != stage:
                there_s = max(done_s, self.sent_s.get((stage, following), 0.0))
                there_s += self.pipeline.send_s[stage][following]
                self.sent_s[stage, following] = there_s
            self._come(there_s, part, place + 1)


def improved(
    start: Choice, moved: Callable[[Choice, Random], Choice], cost: Callable[[Choice], float], tries: int
) -> Choice:
    """The best of so many random moves, each taken where it is no worse."""
    random, best, best_cost = Random(0), start, cost(start)
    for _ in range(tries):
        other = moved(best, random)
        other_cost = cost(other)
        if other_cost <= best_cost:
            best, best_cost = other, other_cost
    return best


def swapped(order: Sequence[int], random: Random) -> tuple[int, ...]:
    """Two machines change places."""
    a, b = random.sample(range(len(order)), 2)
    changed = list(order)
    changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)


def in_turns(stages: int, parts: int, skipped: int) -> tuple[Path, ...]:
    """Each micro-batch skips so many stages behind the first, all of these equally often."""
    behind, left_out = (
        range(1, stages),
        [(part * skipped + i) % (stages - 1) for part in range(parts) for i in range(skipped)],
    )
    skips = [{behind[each] for each in left_out[part * skipped : (part + 1) * skipped]} for part in range(parts)]
    return tuple(tuple(stage for stage in range(stages) if stage not in skip) for skip in skips)


def exchanged(paths: tuple[Path, ...], random: Random) -> tuple[Path, ...]:
    """Two micro-batches exchange a stage that one visits and the other does not, so that stages stay equally loaded."""
    one, other = random.sample(range(len(paths)), 2)
    ours, theirs = set(paths[one]) - set(paths[other]), set(paths[other]) - set(paths[one])
    if not ours or not theirs:
        return paths
    given, taken = random.choice(sorted(ours)), random.choice(sorted(theirs))
    changed = list(paths)
    changed[one] = tuple(sorted({*paths[one], taken} - {given}))
    changed[other] = tuple(sorted({*paths[other], given} - {taken}))
    return tuple(changed)


def main() -> None:
    """Print a row for each number of skipped stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cluster", metavar="FILE.json", help="machines and links, one stage each (default: 8 A100 in 3 regions)"
    )
    parser.add_argument("--microbatches", type=int, default=28)
    parser.add_argument(
        "--skipped", type=int, nargs="*", default=[1, 2, 3], help="stages that a micro-batch leaves out"
    )
    parser.add_argument("--tries", type=int, default=1000, help="of each local search")
    options = parser.parse_args()
    cluster = in_regions() if options.cluster is None else gfx.Cluster.load(options.cluster)
    if cluster.nodes is None:
        parser.error("give a cluster of nodes (docs/unlike-clusters.md)")
    nodes, stages, parts = cluster.nodes, len(cluster.nodes.nodes), options.microbatches
    whole = in_turns(stages, parts, 0)
    even = Pipeline(1.0, [[0.0] * stages] * stages)
    assert even.step_s(whole) == 3 * (parts + stages - 1), "1F1B without messages"
    listed = tuple(range(stages))
    order = improved(listed, swapped, lambda order: Pipeline.of(nodes, order).step_s(whole), options.tries // 5)
    pipeline = Pipeline.of(nodes, order)
    console, full_s = Console(soft_wrap=True, highlight=False), pipeline.step_s(whole)
    console.print(f"{machine.describe()}\n")
    table = Table("skipped", "paths", "step", "of all stages", "of the work")
    table.add_row("0", "machines as listed", format_seconds(Pipeline.of(nodes, listed).step_s(whole)), "", "100%")
    table.add_row("0", f"machines {', '.join(map(str, order))}", format_seconds(full_s), "100%", "100%")
    for skipped in options.skipped:
        turns = in_turns(stages, parts, skipped)
        for name, paths in {
            "in turns": turns,
            "searched": improved(turns, exchanged, pipeline.step_s, options.tries),
        }.items():
            step_s = pipeline.step_s(paths)
            share = f"{1 - skipped / stages:.0%}"
            table.add_row(str(skipped), name, format_seconds(step_s), f"{step_s / full_s:.0%}", share)
    console.print(table)


if __name__ == "__main__":
    main()

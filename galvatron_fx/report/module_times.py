"""What takes a rank's computing time: seconds by module path and by kind of block, as the lowered graphs are priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cost_models.node_time import NodeTime
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.prediction import ACCUMULATE, COMPUTE, HOST_COPIES, RECOMPUTE
from galvatron_fx.report.collective_rows import ONCE_A_STEP, task_graphs
from passes.simulation.short_model import Label
from passes.simulation.short_program import ShortProgram

__all__ = ["ModuleTime", "by_module", "module_times", "part_of_path"]

_DEPTH = 2  # names of a path behind the number of a layer, or from its start where there is none
NO_MODULE = "(outside of modules)"


@dataclass(frozen=True)
class ModuleTime:
    """Computing in one module of one kind of block: ``label`` of the blocks; ``module``: its path, ``#`` for numbers of
    layers; ``forward_s``, ``backward_s`` and ``again_s`` (recomputation): seconds of a step, a rank of each stage.
    """

    label: Label
    module: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    again_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.again_s


def module_times(
    program: ShortProgram, cluster: Cluster, kinds: frozenset[str], num_microbatches: int
) -> list[ModuleTime]:
    """Return the seconds of operators by kind of block and module, in the order of blocks; no collectives, no copies.

    ``kinds``, ``num_microbatches``: as of :func:`collective_rows`. Paths are those that nodes carry, of which as much
    counts as says what part of a layer they are in.
    """
    blocks, prices, layout = program.blocks, NodeTime(cluster), program.lowered.layout
    seconds: dict[tuple[Label, str], list[float]] = {}
    for position, task, graph in task_graphs(program, kinds):
        task_blocks = set(program.blocks_of(position))
        for node in graph.graph.nodes:
            price = prices.price(node, layout) if node.target not in c.COLLECTIVES else None
            if price is None or price.cause.kind in (ACCUMULATE, HOST_COPIES):
                continue
            block = max(meta_of(node).block, 0)
            times = blocks[block].stands_for if block in task_blocks else program.short.stage_of.count(position)
            runs = times * (1 if task in ONCE_A_STEP else num_microbatches)
            sums = seconds.setdefault((blocks[block].label, part_of_path(meta_of(node).module)), [0.0, 0.0, 0.0])
            place = 2 if price.cause.kind == RECOMPUTE else int(meta_of(node).phase == "backward")
            assert price.cause.kind in (COMPUTE, RECOMPUTE)
            sums[place] += price.seconds * runs
    order = {label: i for i, label in enumerate(dict.fromkeys(block.label for block in blocks))}
    rows = [ModuleTime(label, module, *sums) for (label, module), sums in seconds.items() if sum(sums)]
    return sorted(rows, key=lambda row: (order[row.label], -row.total_s))


def part_of_path(module: str) -> str:
    """The path of a module up to what says which part of a layer it is: "model.layers.17.mlp.up_proj" is
    "model.layers.#.mlp", "model.embed_tokens" stays.
    """
    names = ["#" if name.isdecimal() else name for name in module.split(".")] if module else []
    if not names:
        return NO_MODULE
    start = names.index("#") + 1 if "#" in names else 0
    return ".".join(names[: start + (1 if start else _DEPTH)])


def by_module(rows: Sequence[ModuleTime]) -> list[ModuleTime]:
    """The rows of all blocks added up by module, the longest first."""
    return sorted(_summed(rows), key=lambda row: -row.total_s)


def _summed(rows: Sequence[ModuleTime]) -> Iterator[ModuleTime]:
    for _, group in groupby(sorted(rows, key=lambda row: row.module), key=lambda row: row.module):
        same = list(group)
        yield ModuleTime(
            same[0].label,
            same[0].module,
            sum(row.forward_s for row in same),
            sum(row.backward_s for row in same),
            sum(row.again_s for row in same),
        )

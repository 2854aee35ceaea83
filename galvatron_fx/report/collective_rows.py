"""Every collective of a plan's step as rows of a table: what it moves, how often, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import fx

from cost_models.node_time import NodeTime
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.prediction import TRANSFER, Cause
from galvatron_fx.ir.plan.schedule import SPREAD
from galvatron_fx.report.reasons import Reasons
from passes.lowering.lower_step import Lowered
from passes.simulation.short_model import Label
from passes.simulation.short_program import ShortProgram
from passes.simulation.stages import StagesReport

__all__ = ["ONCE_A_STEP", "CollectiveRow", "collective_rows", "task_graphs"]

ONCE_A_STEP = ("start", "finish")
_NUMBER = re.compile(r"(?<=\.)\d+(?![\w])")  # of a layer, in the name of a module


@dataclass(frozen=True)
class CollectiveRow:
    """Equal collectives of equal blocks.

    ``label``: of the blocks, None for transfers between stages; ``task``: when it runs; ``kind``: the operation;
    ``axes``: mesh axes that it is over, outermost is 0; ``shape``, ``dtype``: of the larger of what goes in and what
    comes out on a rank; ``size_bytes``: of the whole tensor, as if it were not sharded along ``axes``; ``sent_bytes``:
    by each rank, in a ring; ``count``: how often it runs in a step, in all blocks and micro-batches; ``each_s``: once.
    """

    label: Label | None
    task: str
    kind: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    sent_bytes: float
    count: int
    each_s: float
    why: str

    @property
    def total_s(self) -> float:
        """Seconds of all of them together."""
        return self.count * self.each_s


def task_graphs(program: ShortProgram, kinds: frozenset[str]) -> Iterator[tuple[int, str, fx.GraphModule]]:
    """The graphs that run: the stage's position among the kept ones, the task's name and the graph.

    ``kinds``: of the schedule's actions: F, B, I, W.
    """
    if isinstance(program.lowered, Lowered):
        yield 0, "forward", program.lowered.halves.forward
        yield 0, "backward", program.lowered.halves.backward
        return
    names = ("start", "forward", *(("backward",) if "B" in kinds else ()))
    names += (*(("input_grad", "weight_grad") if "I" in kinds else ()), "finish")
    for position, stage in enumerate(program.lowered.stages):
        for name in names:
            if not stage.tasks[name].is_empty:
                yield position, name, stage.tasks[name].graph


def collective_rows(
    program: ShortProgram, cluster: Cluster, kinds: frozenset[str], num_microbatches: int
) -> list[CollectiveRow]:
    """Return the rows in the order of the blocks and of their first run."""
    reasons = Reasons(program.lowered.joint)
    layout = program.lowered.layout
    blocks, prices = program.blocks, NodeTime(cluster)
    rows: dict[tuple[object, ...], CollectiveRow] = {}
    for position, task, graph in task_graphs(program, kinds):
        task_blocks = set(program.blocks_of(position))
        for node in graph.graph.nodes:
            if node.target not in c.COLLECTIVES and node.target not in CHUNKED:
                continue
            block = max(meta_of(node).block, 0)
            times = blocks[block].stands_for if block in task_blocks else program.short.stage_of.count(position)
            runs = times * (1 if task in ONCE_A_STEP else num_microbatches)
            why = reasons.of(node)
            row = _row(reasons.whole(node), layout, prices, blocks[block].label, task, runs, why)
            key = (*vars(replace(row, count=0, why="")).values(), _NUMBER.sub("#", why))
            known = rows.setdefault(key, replace(row, count=0))
            rows[key] = replace(known, count=known.count + runs)
    order = {label: i for i, label in enumerate(dict.fromkeys(block.label for block in blocks))}
    return sorted((row for row in rows.values() if row.count), key=lambda row: order[row.label])  # type: ignore[index]


def transfer_rows(program: ShortProgram, step: StagesReport, pipeline_axes: tuple[int, ...]) -> list[CollectiveRow]:
    """Return what passes between stages on different pipeline ranks, equal ones together."""
    assert not isinstance(program.lowered, Lowered)
    ranks = step.schedule.rank_of_stage
    rows: dict[tuple[object, ...], CollectiveRow] = {}
    for index, times in enumerate(step.times):
        stage = program.lowered.stages[program.short.stage_of[index]]
        for task, names, to in (("send", stage.sends, index + 1), ("send_back", stage.sends_back, index - 1)):
            seconds = times.get((task, Cause(TRANSFER)), 0.0)
            if not 0 <= to < len(ranks) or not step.schedule.sends(index, to) or not names:
                continue
            is_told = ranks[to] == SPREAD
            size = sum(stage.specs[name].size_bytes for name in names)
            spec = max((stage.specs[name] for name in names), key=lambda spec: spec.size_bytes)
            ahead = task == "send"
            what = "activations" if ahead else "gradients of activations"
            kind, place = ("broadcast", "that all ranks compute") if is_told else ("send", "on another rank")
            why = f"{what} ({len(names)} values) for the stage {'behind' if ahead else 'before'} {place}"
            row = CollectiveRow(
                None, "forward" if ahead else "backward", kind, pipeline_axes, spec.shape, _dtype(spec.dtype), size,
                float(size), step.schedule.num_microbatches, seconds, why,
            )  # fmt: skip
            key = (task, is_told, size, spec.shape, seconds)
            known = rows.get(key)
            rows[key] = replace(row, count=row.count + (known.count if known else 0))
    return list(rows.values())


def _row(
    node: fx.Node, layout: Layout, prices: NodeTime, label: Label, task: str, runs: int, why: str
) -> CollectiveRow:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    name: str = node.target.__name__  # type: ignore[union-attr]
    kind = c.KINDS.get(node.target, name)
    axes = layout.merged_axes[int(node.args[-1])].axes  # type: ignore[arg-type]
    degree = prod(prices.cluster.axes[axis].size for axis in axes)
    specs = meta_of(source).spec, meta_of(node).spec
    spec = max(specs, key=lambda spec: spec.size_bytes)
    size = specs[0].size_bytes * (degree if kind in ("all_gather", "all_to_all") else 1)
    share = {"all_reduce": 2.0, "all_to_all": 1 / degree}.get(kind, 1.0) * (degree - 1) / degree
    share = 1.0 if kind == "rotate" else share
    priced = prices.price(node, layout)
    assert priced is not None
    return CollectiveRow(
        label, task, name, axes, spec.shape, _dtype(spec.dtype), size, share * size, runs, priced.seconds, why
    )


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

"""What differs between two plans: block by block, and in what is predicted for the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from galvatron_fx.ir.periods import periodic_runs
from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.plan import BlockPlan, Plan
from galvatron_fx.ir.plan.plan_table import describe_blocks, describe_keeps, describe_roles
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

__all__ = ["PlanDiff", "compare"]


@dataclass(frozen=True)
class _Total:
    """One property of both plans."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class _Pair:
    """A block of each plan with its position, None where the other plan has none like it."""

    first: tuple[int, BlockPlan] | None
    second: tuple[int, BlockPlan] | None

    def key(self) -> Any:
        """What pairs in one row have in common."""
        return [side and (side[1].strategy, side[1].fingerprint) for side in (self.first, self.second)]


@dataclass(frozen=True)
class _Run:
    """Pairs side by side, or in turns with others, that differ in the same way."""

    pairs: tuple[_Pair, ...]

    @property
    def differs(self) -> bool:
        """Whether the strategies do, or a plan lacks the blocks."""
        first, second = self.pairs[0].first, self.pairs[0].second
        return first is None or second is None or first[1].strategy != second[1].strategy

    def side(self, number: int) -> list[tuple[int, BlockPlan]]:
        """Positions and blocks of the first plan (0) or the second (1)."""
        sides = ((pair.first, pair.second)[number] for pair in self.pairs)
        return [side for side in sides if side is not None]

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            name: {
                "blocks": [position for position, _ in side],
                "strategy": side[0][1].strategy.to_dict(),
                "time_s": sum(block.time_s for _, block in side),
                "memory_bytes": sum(block.memory_bytes for _, block in side),
            }
            if (side := self.side(number))
            else None
            for number, name in enumerate(("first", "second"))
        }


@dataclass(frozen=True)
class PlanDiff:
    """Two plans with the ``totals`` and the ``runs`` of blocks in which they differ; ``str`` shows them."""

    first: Plan
    second: Plan
    totals: tuple[_Total, ...]
    runs: tuple[_Run, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, notes included."""
        return self.first == self.second

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "equal": self.is_equal,
            "same_model": self.first.graph_fingerprint == self.second.graph_fingerprint,
            "totals": [vars(total) for total in self.totals],
            "blocks": [run.document() for run in self.runs],
        }

    def __str__(self) -> str:
        """Return tables of plain text, A for the first plan and B for the second."""
        if self.is_equal:
            return "the plans are equal"
        if not self.totals and not self.runs:
            return "the plans differ in notes, in names or in predictions of single blocks alone"
        rows = [
            (_NAMES[t.name], *(_shown(t.name, value) for value in (t.first, t.second)), _change(t)) for t in self.totals
        ]
        lines = text_table.render(("", "A", "B", "change"), rows, 1) if rows else []
        if not self.runs:
            return "\n".join([*lines, "", "every block has the same strategy in both"])
        cells = [row for run in self.runs for row in _rows(run, self.first, self.second)]
        table = text_table.render(("blocks", "", "roles", "keeps for backward", "time", "memory/rank"), cells, 4)
        return "\n".join([*lines, "", *table])


def compare(first: Plan, second: Plan) -> PlanDiff:
    """Return what differs."""
    totals = tuple(total for total in _totals(first, second) if total.first != total.second)
    return PlanDiff(first, second, totals, tuple(run for run in _runs(first, second) if run.differs))


def _totals(first: Plan, second: Plan) -> list[_Total]:
    def both(name: str) -> _Total:
        return _Total(name, getattr(first, name), getattr(second, name))

    plans = ("axis_sizes", "graph_fingerprint", "step_time_s", "peak_memory_bytes", "memory_budget_bytes", "optimizer")
    names = ("num_stages", "num_microbatches", "schedule", "first_blocks", "vocabulary")
    pipelining = [_Total(name, getattr(first.pipelining, name), getattr(second.pipelining, name)) for name in names]
    return [*map(both, plans), *pipelining]


def _runs(first: Plan, second: Plan) -> Iterator[_Run]:
    pairs = list(_pairs(first, second))
    for run in periodic_runs([pair.key() for pair in pairs]):
        yield from (_Run(tuple(pairs[place] for place in places)) for places in run.places())


def _pairs(first: Plan, second: Plan) -> Iterator[_Pair]:
    """Blocks side by side: by position where both have as many, else as far as they are equal from both ends."""
    a, b = list(enumerate(first.blocks)), list(enumerate(second.blocks))
    if len(a) == len(b):
        yield from map(_Pair, a, b)
        return
    head = _alike(a, b)
    tail = min(_alike(a[::-1], b[::-1]), len(a) - head, len(b) - head)
    yield from map(_Pair, a[:head], b[:head])
    yield from (_Pair(x, None) for x in a[head : len(a) - tail])
    yield from (_Pair(None, y) for y in b[head : len(b) - tail])
    yield from map(_Pair, a[len(a) - tail :], b[len(b) - tail :])


def _alike(a: Sequence[tuple[int, BlockPlan]], b: Sequence[tuple[int, BlockPlan]]) -> int:
    """How many blocks have equal fingerprints before the first that do not."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0][1].fingerprint == pair[1][1].fingerprint, pairs))


_NAMES = {
    "axis_sizes": "mesh",
    "graph_fingerprint": "made for graph",
    "step_time_s": "step time",
    "peak_memory_bytes": "peak per rank",
    "memory_budget_bytes": "memory budget",
    "optimizer": "optimizer",
    "num_stages": "stages",
    "num_microbatches": "micro-batches",
    "schedule": "schedule",
    "first_blocks": "stages begin at",
    "vocabulary": "embedding and head",
}


def _shown(name: str, value: Any) -> str:
    if value in (None, "", ()):
        return "-"
    if name == "axis_sizes":
        return "×".join(map(str, value))
    if name == "first_blocks":
        return ", ".join(map(str, value))
    if name == "graph_fingerprint":
        return str(value)[:12]
    if name == "step_time_s":
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else str(value)


def _change(total: _Total) -> str:
    numbers = total.name.endswith(("_s", "_bytes")) and total.first and total.second
    return f"{total.second / total.first - 1:+.1%}" if numbers else ""


def _rows(run: _Run, first: Plan, second: Plan) -> Iterator[tuple[str, ...]]:
    """A row for each plan that has the blocks."""
    for number, plan in enumerate((first, second)):
        side = run.side(number)
        if side:
            blocks = [block for _, block in side]
            yield (
                describe_blocks(_places([position for position, _ in side]), [block.name for block in blocks]),
                "AB"[number],
                describe_roles(blocks[0].strategy, plan.axis_sizes),
                "-" if plan.forward_only else describe_keeps(blocks[0].strategy),
                format_seconds(sum(block.time_s for block in blocks)),
                format_bytes(sum(block.memory_bytes for block in blocks)),
            )


def _places(positions: list[int]) -> range:
    step = positions[1] - positions[0] if len(positions) > 1 else 1
    return range(positions[0], positions[-1] + 1, step)

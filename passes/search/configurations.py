"""The ways to use the outermost axes for stages that a search tries, and what is wrong with pins that allow none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd, inf, prod

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import ClusterError, PlanError
from galvatron_fx.ir.graph.symbols import ONE_BATCH
from galvatron_fx.ir.plan.pipelining import ENDS, SPREAD_ENDS
from galvatron_fx.ir.plan.schedule import FORWARD_ONLY_SCHEDULE, SCHEDULES, SEARCH, legal
from galvatron_fx.ir.plan.strategy import PIPELINE
from passes.search.candidates import far_apart
from passes.search.solvers.stage_search import Configuration

_SEARCHED_SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "zbv")
_IN_TURNS = "interleaved_1f1b"
_STAGES_A_RANK = {_IN_TURNS: 2, "zbv": 2, "dualpipev": 2}
_ON_ONE_RANK = ("1f1b", "gpipe")
_COARSE_SCHEDULES = ("1f1b", "zbv")
_MOST_STAGES = 64
_MICROBATCHES = 8  # a pipeline rank: more of them fill the pipeline no better, and are for want of memory
_SHOWN = 3  # reasons


@dataclass(frozen=True)
class Pins:
    """What of the pipeline is decided already; None is searched. Schedule "search": tables are searched for the best of
    what named schedules found. Vocabulary "spread": there are stages, and two blocks beside them.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    vocabulary: str | None = None

    @property
    def is_spread(self) -> bool:
        """Whether all pipeline ranks have to compute the first and the last block together."""
        return self.vocabulary == SPREAD_ENDS

    def __str__(self) -> str:
        """Return what is pinned, as the options are written."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None) or "no pins"


@dataclass(frozen=True)
class Ladder:
    """All configurations whose stages take the ``pipeline_axes`` outermost axes, fewer micro-batches first.

    The first of the ``rungs`` are tried at any rate; each later one holds the next number of micro-batches, which only
    pays where memory is short. Of numbers less than twice apart rungs have one; ``left_out`` are the others, which are
    tried beside the best.
    """

    pipeline_axes: int
    rungs: tuple[tuple[Configuration, ...], ...]
    left_out: tuple[Configuration, ...] = ()

    def beside(self, num_microbatches: int) -> list[Configuration]:
        """What was left out between a number of micro-batches and the next on the rungs, below it and above."""
        counts = {setting.num_microbatches for rung in self.rungs for setting in rung}
        low = max((count for count in counts if count < num_microbatches), default=0)
        high = min((count for count in counts if count > num_microbatches), default=inf)
        return [setting for setting in self.left_out if low < setting.num_microbatches < high]


@dataclass(frozen=True)
class _Shape:
    """Stages on the ranks of some outermost axes."""

    axes: int
    ranks: int
    schedule: str
    stages: int


@dataclass(frozen=True)
class Configurations:
    """All that pins, axes and batch allow for a model of ``blocks`` blocks and a batch of ``batch`` samples.

    ``has_loss``: whether the graph trains; what has no loss is cut into stages and micro-batches by pins alone, unless
    it is ``forward_only``, where any is; ``coarse``: fewer schedules and numbers of micro-batches, for surveys;
    ``with_weights``: how many of the blocks use parameters (None: all), of which every pipeline rank needs one;
    ``varies``: whether there may be another number of samples than the example's.
    """

    cluster: Cluster
    roles: Sequence[str]
    pins: Pins
    batch: int
    blocks: int
    has_loss: bool = True
    coarse: bool = False
    forward_only: bool = False
    with_weights: int | None = None
    varies: bool = True

    def ladders(self) -> list[Ladder]:
        """Return them by pipeline axes. Raises PlanError, with the remedy, for pins that leave none."""
        self._check_values()
        shapes = [shape for shape in self._shapes() if self.pins.num_stages in (None, shape.stages)]
        if not shapes:
            raise PlanError(self._no_shape())
        ladders = [self._ladder(axes, list(same)) for axes, same in groupby(shapes, key=lambda shape: shape.axes)]
        if not any(ladder.rungs for ladder in ladders):
            tried = [(shape, count) for shape in shapes for count in self._counts(shape.ranks)]
            reasons = [legal(shape.schedule, shape.ranks, shape.stages, count) for shape, count in tried]
            raise PlanError(self._nothing_legal([reason for reason in reasons if reason is not None]))
        return [ladder for ladder in ladders if ladder.rungs]

    def _ladder(self, pipeline_axes: int, shapes: Sequence[_Shape]) -> Ladder:
        ranks, settings = shapes[0].ranks, list[Configuration]()
        for shape in shapes:
            settings += [
                Configuration(pipeline_axes, shape.stages, shape.schedule, count)
                for count in self._counts(ranks)
                if legal(shape.schedule, ranks, shape.stages, count) is None
            ]
        kept = self._one_an_octave(ranks, Counter(setting.num_microbatches for setting in settings))
        most = _MICROBATCHES * ranks if ranks > 1 else 1
        of_rungs = [[count for count in kept if count <= most], *([count] for count in kept if count > most)]
        rungs = [tuple(each for each in settings if each.num_microbatches in counts) for counts in of_rungs if counts]
        left_out = sorted(each for each in settings if each.num_microbatches not in kept)
        return Ladder(pipeline_axes, tuple(rungs), tuple(left_out))

    def _one_an_octave(self, ranks: int, settings: Mapping[int, int]) -> list[int]:
        """Of numbers of micro-batches less than twice apart the one that most schedules take (``settings`` has how
        many), and whose samples most of the ranks of a stage can share evenly; the least of equals.
        """
        inside = prod(axis.size for axis in self.cluster.axes) // ranks

        def worth(count: int) -> tuple[int, int, int]:
            return settings[count], gcd(self.batch // count, inside), -count

        counts = sorted(settings)
        octaves = groupby(counts, key=lambda count: (count // counts[0]).bit_length())
        return [max(octave, key=worth) for _, octave in octaves]

    # ---- what can be ----

    def _shapes(self) -> Iterator[_Shape]:
        between = self.blocks - 2 * self.pins.is_spread
        for axes in range(self.pins.is_spread, len(self.cluster.axes) + 1):
            if self._unlike(axes) is not None or self._has_unlike_ends:
                continue
            ranks = prod(axis.size for axis in self.cluster.axes[:axes])
            if (axes and not self._may_pipeline) or ranks > _MOST_STAGES:
                continue
            if axes and self.cluster.axes[axes - 1].size == 1:
                continue
            for schedule in self._schedules(ranks):
                stages = self._stages(schedule, ranks)
                if stages <= between and ranks <= max(self._most_ranks, 1):
                    yield _Shape(axes, ranks, schedule, stages)

    @property
    def _most_ranks(self) -> int:
        return self.blocks if self.with_weights is None else self.with_weights

    @property
    def _has_unlike_ends(self) -> bool:
        """Whether blocks of all ranks would be on devices of several kinds."""
        return self.pins.is_spread and len(self.cluster.kinds) > 1

    def _unlike(self, axes: int) -> ClusterError | None:
        """Why so many axes cannot hold stages, as some would have devices of several kinds."""
        try:
            self.cluster.parts(axes)
        except ClusterError as error:
            return error
        return None

    def _stages(self, schedule: str, ranks: int) -> int:
        """Stages on so many ranks: ranks that take theirs in turns have as many as are pinned, two if none are."""
        pinned = self.pins.num_stages or 0
        if schedule == _IN_TURNS and 1 < ranks < pinned and pinned % ranks == 0:
            return pinned
        return ranks * _STAGES_A_RANK.get(schedule, 1) if ranks > 1 else 1

    @property
    def _may_pipeline(self) -> bool:
        return (PIPELINE in self.roles and self._may_schedule) or (self.pins.num_stages or 1) > 1

    @property
    def _may_schedule(self) -> bool:
        return self.has_loss or self.forward_only

    def _schedules(self, ranks: int) -> Sequence[str]:
        wanted = self.pins.schedule
        if wanted not in (None, SEARCH):
            return [wanted] if ranks > 1 or wanted in _ON_ONE_RANK else []
        if self.forward_only:
            return (FORWARD_ONLY_SCHEDULE,)
        return ("1f1b",) if ranks == 1 else _COARSE_SCHEDULES if self.coarse else _SEARCHED_SCHEDULES

    def _counts(self, ranks: int) -> list[int]:
        """Numbers of micro-batches: at least one a pipeline rank, of small batches as many as there are samples for."""
        if self.pins.num_microbatches is not None:
            return [self.pins.num_microbatches]
        if not self._may_schedule:
            return [1]
        divisors = _divisors(self.batch)
        counts = [count for count in divisors if count >= ranks] or divisors
        return far_apart(counts) if self.coarse else counts

    # ---- what cannot be ----

    def _check_values(self) -> None:
        """Raise PlanError for pins that no mesh would allow."""
        pins = self.pins
        for name in ("num_stages", "num_microbatches"):
            value = getattr(pins, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PlanError(f"{name} is {value!r}; give an int from 1, or None to search it")
        if pins.schedule is not None and pins.schedule not in (*SCHEDULES, SEARCH):
            raise PlanError(f"unknown schedule {pins.schedule!r}: use one of {', '.join((*SCHEDULES, SEARCH))}")
        count = pins.num_microbatches
        if not self.varies and count not in (None, 1):
            raise PlanError(ONE_BATCH)
        if count is not None and self.batch % count:
            divisors = _divisors(self.batch)
            near = [d for d in divisors if d < count][-1:] + [d for d in divisors if d > count][:1]
            raise PlanError(
                f"{count} micro-batches do not divide a batch of {self.batch}: use a divisor of the batch, such as "
                f"{' or '.join(map(str, near))}"
            )

    def _no_shape(self) -> str:
        """Why there is no way to use the axes."""
        pins = self.pins
        if not any(True for _ in self._shapes()) and (unlike := self._unlike(0)) is not None:
            return str(unlike)
        possible = sorted({shape.stages for shape in self._shapes()})
        if self._has_unlike_ends:
            return f"vocabulary={SPREAD_ENDS!r} is for devices of one kind, and there are several: use {ENDS!r}"
        if pins.num_stages is not None and pins.num_stages > self.blocks:
            most = f"at most {possible[-1]}" if possible else "fewer"
            return (
                f"num_stages={pins.num_stages} for a model of {self.blocks} blocks, and every stage needs a block: use "
                f"{most} (what the outermost axes of {self._mesh} can hold), or a model of more blocks"
            )
        if pins.num_stages is not None and self._most_ranks < min(pins.num_stages, self.blocks):
            return (
                f"num_stages={pins.num_stages} for a model of {self.blocks} blocks, of which {self._most_ranks} have "
                f"parameters, and every pipeline rank needs some to train: use fewer stages"
            )
        if not self._may_pipeline:
            return f"{pins} needs stages: add '{PIPELINE}' to the roles, or give num_stages"
        under = f" under schedule {pins.schedule!r}" if pins.schedule is not None else ""
        under += f" between two blocks of all ranks (vocabulary={SPREAD_ENDS!r})" * pins.is_spread
        if not possible:
            return (
                f"no number of stages{under} fits {self._mesh} and a model of {self.blocks} blocks: use another "
                f"schedule, a mesh with a smaller outermost axis, or a model of more blocks"
            )
        return (
            f"num_stages={pins.num_stages} cannot be formed from the outermost axes of {self._mesh}{under}; possible: "
            f"{_listed(possible)}"
        )

    def _nothing_legal(self, reasons: Sequence[str]) -> str:
        """Why none of the possible numbers of stages has a schedule."""
        return f"{self.pins} cannot run on {self._mesh}: {'; or '.join(list(dict.fromkeys(reasons))[:_SHOWN])}"

    @property
    def _mesh(self) -> str:
        return f"a mesh of {'×'.join(map(str, self.cluster.shape))}"


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

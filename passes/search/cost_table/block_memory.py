"""What blocks hold on the device and on the host, an entry for every strategy that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from galvatron_fx.ir.arrays import Bools, Floats
from passes.analysis.kept_sets import KeptSet
from passes.search.cost_table.asked import Asked
from passes.search.cost_table.block_columns import Columns
from passes.search.cost_table.offload_levels import ALL_HERE, PARAMETERS_AWAY

__all__ = ["BlockMemory", "Ways"]


@dataclass(frozen=True)
class Ways:
    """How blocks run.

    ``late``: gathers start where they are needed, not a block ahead; ``several`` micro-batches; ``staged``: these, or
    stages, so that some things are done ``once`` a step and not once a micro-batch; ``keeps``: what was gathered stays
    for backward; ``folds``: updates take gradients of a block as soon as these are there; ``states_away``: optimizer
    states are not on the device; ``all_away``: nor are parameters and gradients.
    """

    late: Bools
    several: Bools
    pipelined: Bools
    staged: Bools
    keeps: Bools
    once: Bools
    folds: Bools
    states_away: Bools
    all_away: Bools

    @classmethod
    def of(cls, asked: Asked, kept: tuple[KeptSet, ...], folds: bool) -> Ways:
        """Read what was ``asked``, where blocks that recompute keep the values ``kept``."""
        staged = asked.several | asked.pipelined
        whole = asked.again & ~np.array([bool(numbers) for numbers in kept], dtype=np.bool_)
        keeps = asked.keep_gathered & ~whole
        return cls(
            late=asked.gather_late,
            several=asked.several,
            pipelined=asked.pipelined,
            staged=staged,
            keeps=keeps,
            once=keeps & staged,
            folds=folds & ~staged,
            states_away=asked.home != ALL_HERE,
            all_away=asked.home == PARAMETERS_AWAY,
        )


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of blocks by their ``terms`` and ``ways``; ``prefetches``: whether anything can run beside computing.

    Gradients that are reduced after the last micro-batch grow whole until then: these are ``sums``.
    """

    terms: Columns
    ways: Ways
    prefetches: bool

    @cached_property
    def held(self) -> Floats:
        """Gathered parameters that stay for the whole step."""
        return np.where(self.ways.keeps, self.terms.gathered_bytes, 0.0)

    @cached_property
    def sums(self) -> Floats:
        """Sums of gradients over micro-batches."""
        whole = np.where(self.ways.keeps, self.terms.whole_gradient_bytes, self.terms.gradient_bytes)
        return np.where(self.ways.several, whole, 0.0)

    @cached_property
    def gradients(self) -> Floats:
        """Gradients that the optimizer takes; where sums were whole, they take the place of what was gathered."""
        return np.where(self.ways.keeps & self.ways.several, 0.0, self.terms.gradient_bytes)

    @cached_property
    def folded(self) -> Floats:
        """Gradients that are there only while their block computes."""
        return np.where(self.ways.folds, self.terms.gradient_bytes, 0.0)

    @cached_property
    def sent(self) -> Floats:
        """Gradients that go to the host, where parameters live there."""
        return np.where(self.ways.all_away, np.maximum(self.gradients, self.sums) - self.folded, 0.0)

    @cached_property
    def sent_and_back(self) -> Floats:
        """What moves of gradients for each micro-batch: sums over these come, too."""
        return np.where(self.ways.several, 2 * self.sent, self.sent)

    @cached_property
    def stays(self) -> Bools:
        """Whether parameters that came from the host and were gathered are still there in backward."""
        return self.ways.all_away & self.ways.keeps & (self.terms.gathered_bytes > 0)

    @cached_property
    def comes(self) -> Bools:
        """Whether parameters come from the host for forward, of each micro-batch."""
        return self.ways.all_away & ~(self.stays & self.ways.staged)

    @cached_property
    def comes_back(self) -> Bools:
        """Whether they come for backward, too."""
        return self.ways.all_away & ~self.stays

    @cached_property
    def come_bytes(self) -> Floats:
        """Parameters that come for forward."""
        return np.where(self.comes, self.terms.come_bytes, 0.0)

    @cached_property
    def back_bytes(self) -> Floats:
        """Parameters that come for backward."""
        return np.where(self.comes_back, self.terms.back_bytes, 0.0)

    @cached_property
    def moved(self) -> Floats:
        """Parameters and gradients that are off the device."""
        return np.where(self.ways.all_away, self.terms.parameter_bytes + self.sent, 0.0)

    @cached_property
    def moved_states(self) -> Floats:
        """Optimizer states that are."""
        return np.where(self.ways.states_away, self.terms.state_bytes, 0.0)

    @cached_property
    def static(self) -> Floats:
        """Parameters, gradients, optimizer states and what is gathered for the whole step."""
        here = self.terms.static_bytes - self.moved_states - self.moved - self.terms.gradient_bytes + self.held
        return np.floor(here + np.maximum(self.gradients, self.sums) - self.folded)

    @cached_property
    def transient(self) -> Floats:
        """The most beside these while a block runs: a block's worth of host copies is under way, or ahead, beside what
        computing holds, and so are gathers that are not late.
        """
        copied = self.terms.host_bytes + np.maximum(self.come_bytes, self.back_bytes + self.sent_and_back)
        is_late = self.ways.late | (not self.prefetches)
        ahead = np.where(is_late, 0.0, self.terms.gathered_bytes - self.held)
        computing = copied * (2 if self.prefetches else 1) + self.folded + self.terms.transient_bytes
        most = computing + self.terms.gathered_bytes - self.held + ahead + self.terms.rebuilt_bytes
        adding = np.where(self.ways.several, 2 * self.terms.largest_gradient_bytes, 0.0)
        return np.floor(np.maximum(most, adding))

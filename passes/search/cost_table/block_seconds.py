"""What blocks take, an entry for every strategy that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.operator_time import disk_s, host_copy_s, traffic_s
from cost_models.streams import exposed_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap
from passes.search.cost_table.block_columns import Columns
from passes.search.cost_table.block_memory import BlockMemory, Ways

__all__ = ["BlockSeconds", "Neighbours"]

_ADDING_PASSES = 3  # a term is added to a sum: both are read, a new sum is written

_TINY_S = 1e-30

Neighbours = tuple[float, float]
"""What the blocks before and behind work, over what a block does itself."""


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of blocks by their ``terms`` and ``ways``.

    Gathers that are not late are prefetched beside the computing of a neighbour, for which the block's own stands, or
    a part of it where ``neighbours`` work less. So does it for what reductions run beside; exactly so in a row of equal
    blocks. So are host copies, which other links carry, beside computing and collectives.
    """

    terms: Columns
    ways: Ways
    memory: BlockMemory
    device: Device
    overlap: Overlap
    neighbours: Neighbours
    on_disk: bool

    @cached_property
    def forward(self) -> Floats:
        """Of one micro-batch, with what it waits for."""
        copies_s = host_copy_s(self.device, self._forward_copies_bytes, self._forward_copies)
        waited_s = self._forward_computing + self._forward_exposed + self._gather_late + self._forward_skew
        return waited_s + np.maximum(copies_s - self._beside(waited_s), 0.0)

    @cached_property
    def backward(self) -> Floats:
        """Of one micro-batch, with what it waits for."""
        gathered_s = np.where(self.ways.keeps, 0.0, self._gather_late)
        return self._backward_with_copies + self._backward_exposed + gathered_s + self._backward_skew

    @cached_property
    def weight(self) -> Floats:
        """The part of backward that makes gradients of weights, with its share of what is waited for."""
        reduce_s, gather_s = self._back_reduce, self._back_gather
        return self._weights + self._backward_exposed * (reduce_s / np.maximum(gather_s + reduce_s, _TINY_S))

    @cached_property
    def once(self) -> Floats:
        """Of the whole step: the update, what comes and goes for it, and what waits for all micro-batches."""
        terms, ways, sent = self.terms, self.ways, self.memory.sent
        sums = ways.all_away & ways.staged & ((terms.reduce_s > 0) | (ways.keeps & (terms.scatter_s > 0)))
        gathers_s = terms.gather_s + terms.gather_work_s + terms.scatter_s + terms.scatter_work_s
        stays = self.memory.stays & ways.staged
        return (
            terms.update_s
            + np.where(ways.states_away, np.maximum(self._update_copies() - self._beside_update, 0.0), 0.0)
            + np.where(stays, host_copy_s(self.device, terms.come_bytes, terms.comes), 0.0)
            + np.where(sums, host_copy_s(self.device, 2 * sent, 2 * terms.trained), 0.0)
            + np.where(ways.pipelined, terms.far_s, 0.0)
            + np.where(ways.staged, terms.reduce_s + terms.reduce_work_s, 0.0)
            + np.where(ways.once, gathers_s, 0.0)
        )

    # ---- computing ----

    @cached_property
    def _forward_computing(self) -> Floats:
        return self.terms.forward_s + self._gather_work

    @cached_property
    def _weights(self) -> Floats:
        adding_bytes = np.where(self.ways.several, _ADDING_PASSES * self.memory.sums, 0.0)
        scatter_s, reduce_s = self._not_once(self.terms.scatter_work_s), self._not_staged(self.terms.reduce_work_s)
        return self.terms.weight_s + scatter_s + reduce_s + traffic_s(self.device, adding_bytes)

    @cached_property
    def _backward_computing(self) -> Floats:
        rebuild_s = np.where(self.ways.keeps, 0.0, self._gather_work) + self.terms.again_s
        return self.terms.backward_s + self._weights - self.terms.weight_s + rebuild_s

    @cached_property
    def _gather_work(self) -> Floats:
        return self._not_once(self.terms.gather_work_s)

    # ---- collectives ----

    @cached_property
    def _gather(self) -> Floats:
        return self._not_once(self.terms.gather_s)

    @cached_property
    def _gather_late(self) -> Floats:
        return np.where(self.ways.late, self._gather, 0.0)

    @cached_property
    def _gather_ahead(self) -> Floats:
        return np.where(self.ways.late, 0.0, self._gather)

    @cached_property
    def _gather_start(self) -> Floats:
        return np.where(self._gather_ahead > 0, self.terms.gather_start_s, 0.0)

    @cached_property
    def _back_gather(self) -> Floats:
        return np.where(self.ways.keeps, 0.0, self._gather_ahead)

    @cached_property
    def _back_reduce(self) -> Floats:
        return self._not_once(self.terms.scatter_s) + self._not_staged(self.terms.reduce_s)

    @cached_property
    def _forward_exposed(self) -> Floats:
        work = min(self.neighbours[0], 1.0)
        busy_s, wait_s = work * self._forward_computing, work * self.terms.forward_wait_s
        return self._exposed(busy_s, wait_s, self._gather_ahead, self._gather_start)

    @cached_property
    def _backward_exposed(self) -> Floats:
        work, busy_s, wait_s = min(self.neighbours[1], 1.0), self._backward_computing, self.terms.backward_wait_s
        gather_start_s = np.where(self.ways.keeps, 0.0, self._gather_start)
        scatter_start_s = self._not_once(self.terms.scatter_start_s)
        start_s = gather_start_s + scatter_start_s + self._not_staged(self.terms.reduce_start_s)
        return np.maximum(
            self._exposed(busy_s, wait_s, self._back_gather + self._back_reduce, start_s),
            self._exposed(work * busy_s, work * wait_s, self._back_gather, gather_start_s),
        )

    def _exposed(self, busy_s: Floats, wait_s: Floats, sent_s: Floats, start_s: Floats) -> Floats:
        """What sending adds to ``busy_s``, in ``wait_s`` of which the device waits for other links and computes
        nothing.
        """
        rest_s = np.maximum(sent_s - wait_s, 0.0)
        return exposed_s(busy_s - wait_s, rest_s, np.minimum(start_s, rest_s), self.overlap)

    @cached_property
    def _forward_skew(self) -> Floats:
        waits = self.terms.forward_waits + self._not_once(self.terms.gather_waits)
        return self._skew(self._forward_computing - self.terms.forward_wait_s, waits)

    @cached_property
    def _backward_skew(self) -> Floats:
        gathers = np.where(self.ways.keeps, 0.0, self._not_once(self.terms.gather_waits))
        waits = self.terms.backward_waits + self.terms.again_waits + gathers
        return self._skew(self._backward_computing - self.terms.backward_wait_s, waits)

    def _skew(self, busy_s: Floats, waits: Floats) -> Floats:
        """What ranks wait for each other where ``waits`` collectives stand among ``busy_s`` of computing, evenly."""
        return waits * self.overlap.skew.seconds(busy_s / np.maximum(waits, 1.0))

    # ---- copies from and to the host ----

    @cached_property
    def _forward_copies_bytes(self) -> Floats:
        return self.terms.host_bytes + self.memory.come_bytes

    @cached_property
    def _forward_copies(self) -> Floats:
        return self.terms.host_copies + np.where(self.memory.comes, self.terms.comes, 0.0)

    @cached_property
    def _back_copies(self) -> Floats:
        memory, times = self.memory, np.where(self.ways.several, 2.0, 1.0)
        gradients = np.where(memory.sent > 0, times * self.terms.trained, 0.0)
        values = self.terms.host_copies + np.where(memory.comes_back, self.terms.backs, 0.0)
        values_s = host_copy_s(self.device, self.terms.host_bytes + memory.back_bytes, values)
        return values_s + host_copy_s(self.device, memory.sent_and_back, gradients)

    @cached_property
    def _backward_with_copies(self) -> Floats:
        busy_s = self._beside(self._backward_computing + self._backward_exposed)
        return self._backward_computing + np.maximum(self._back_copies - busy_s, 0.0)

    @cached_property
    def _beside_update(self) -> Floats:
        """Of backward, what the copies of folded updates run beside."""
        rest_s = np.maximum(self._backward_with_copies - self._back_copies, 0.0)
        return np.where(self.ways.folds & self.overlap.gains, rest_s, 0.0)

    def _update_copies(self) -> Floats:
        """Of states that come and go, each beside one of the way back, or from disk and back; of parameters that are
        not on the device with them, and of the gradients that were sent there.
        """
        terms, sent = self.terms, np.minimum(self.memory.sent, self.terms.gradient_bytes)
        with_states = np.where(self.ways.all_away, terms.gradient_bytes + sent, 0.0)  # parameters are as large
        copies = terms.states + np.where(self.ways.all_away, terms.trained * (1.0 + (sent > 0)), 0.0)
        copies_s = host_copy_s(self.device, terms.state_bytes + with_states, copies)
        return np.maximum(copies_s, disk_s(self.device, terms.state_bytes)) if self.on_disk else copies_s

    # ---- ways ----

    def _beside(self, busy_s: Floats) -> Floats:
        """What host copies run beside."""
        return busy_s if self.overlap.gains else np.zeros_like(busy_s)

    def _not_once(self, amounts: Floats) -> Floats:
        return np.where(self.ways.once, 0.0, amounts)

    def _not_staged(self, amounts: Floats) -> Floats:
        return np.where(self.ways.staged, 0.0, amounts)

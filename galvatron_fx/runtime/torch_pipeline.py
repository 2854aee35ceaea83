"""Stages on torch's pipelining runtime: it walks a schedule and moves tensors; the stages compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cost_models.schedule_time import Span
from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule
from galvatron_fx.ir.plan.transfers import with_transfers
from galvatron_fx.ir.torch_compat.pipelines import pipeline_runtime, runtime_actions, take_over_sends
from galvatron_fx.runtime.stage_runner import StageRunner

T = TypeVar("T")


class Sender:
    """Sends values to one neighbouring stage, those of one micro-batch at a time.

    Torch's runtime would wait for all sends at the end of the step, and hold their tensors until then. Waiting for the
    one before cannot hang: ``with_transfers`` puts a receive into its rank's order together with its send, so that what
    a rank does before receiving never waits for what the sender does after sending.
    """

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, values: Sequence[torch.Tensor]) -> None:
        """Start sending ``values``, once the ones before have arrived."""
        self.settle()
        for value in values:
            tensor = value.contiguous()
            work = dist.isend(tensor, self._peer)
            assert work is not None, "both ranks are in the world"
            self._under_way.append((work, tensor))

    def settle(self) -> None:
        """Wait for what is under way and let go of it."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


class RunningStage:
    """One stage as torch's runtime calls it: it holds what was received until the computation that takes it.

    A stage that all ranks compute together (a spread one) is told what it takes by the rank that has it.

    ``peers``: the global ranks of the pipeline on this rank's coordinates, ``group`` their group. ``spans``: when it
    computed what, in seconds of ``time.perf_counter``, without the wait for what it takes; of asynchronous kernels,
    when they were launched.
    """

    def __init__(
        self,
        runner: StageRunner,
        schedule: Schedule,
        rank: int,
        peers: Sequence[int],
        group: dist.ProcessGroup | None,
        device: str,
    ) -> None:
        self.runner = runner
        self.stage_index = runner.stage.index
        self.num_stages = schedule.num_stages
        self.group_size = schedule.num_ranks
        self.group_rank = rank
        self.is_first = self.stage_index == 0
        self.is_last = self.stage_index == self.num_stages - 1
        self.has_backward = True
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.spans: list[Span] = []
        self._is_spread = schedule.rank_of_stage[self.stage_index] == SPREAD
        self._group = group
        # Of the last stage the first of these has no use, and of the first stage the second; nor have they of a
        # neighbour that is spread.
        ahead, back = (schedule.rank_of_stage[(self.stage_index + step) % self.num_stages] for step in (1, -1))
        self._sends_ahead = (
            not self.is_last and schedule.sends(self.stage_index, self.stage_index + 1) and ahead != SPREAD
        )
        self._keeps_back = not self._is_spread or back == rank
        self._peer_ahead, self._peer_back = peers[ahead], peers[back]
        self._ahead, self._back = Sender(self._peer_ahead), Sender(self._peer_back)
        self._device = device
        self._activations: dict[int, list[Any]] = {}
        self._gradients: dict[int, list[Any]] = {}
        self._outgoing: dict[int, list[Any]] = {}
        self._outgoing_back: dict[int, list[Any]] = {}

    # ---- what moves ----

    def get_fwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        self._activations[index] = self._buffers(self.runner.stage.receives)
        return self._receives(self._activations[index], self._peer_back)

    def get_bwd_recv_ops(self, index: int) -> list[dist.P2POp]:
        self._gradients[index] = self._buffers(self.runner.stage.receives_back)
        return self._receives(self._gradients[index], self._peer_ahead)

    def send_ahead(self, index: int) -> None:
        self._ahead.send(self._outgoing.pop(index))

    def send_back(self, index: int) -> None:
        self._back.send(self._outgoing_back.pop(index))

    def settle(self) -> None:
        """Wait for the last sends."""
        self._ahead.settle()
        self._back.settle()

    def set_local_fwd_input(self, outputs: list[Any], index: int) -> None:
        self._activations[index] = outputs

    def set_local_bwd_input(self, outputs: list[Any], index: int) -> None:
        self._gradients[index] = outputs

    def get_local_bwd_output(self, index: int) -> list[Any]:
        return self._outgoing_back.pop(index)

    def _buffers(self, names: Sequence[str]) -> list[torch.Tensor]:
        specs = [self.runner.stage.specs[name] for name in names]
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]

    def _receives(self, tensors: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        if self._is_spread:  # all ranks receive at once, when they compute
            return []
        return [dist.P2POp(dist.irecv, tensor, peer) for tensor in tensors]

    def _told(self, values: list[Any], source: int) -> list[Any]:
        """What a stage takes; of a spread one, on all ranks what ``source`` has."""
        if self._is_spread:
            for position, value in enumerate(values):
                values[position] = value.contiguous()
                dist.broadcast(values[position], src=source, group=self._group)
        return values

    # ---- what is computed ----

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> list[Any]:
        received = self._told(self._activations.pop(index, []), self._peer_back)
        sends = self._timed("F", index, lambda: self.runner.forward(index, received, keep=self.has_backward))
        if self._sends_ahead:
            self._outgoing[index] = sends
        return sends

    def backward_one_chunk(self, index: int, full_backward: bool = True, **_: Any) -> None:
        received = self._told(self._gradients.pop(index, []), self._peer_ahead)
        kind = "B" if full_backward else "I"
        sends = self._timed(kind, index, lambda: self.runner.backward(index, received, whole=full_backward))
        if self._keeps_back:
            self._outgoing_back[index] = sends

    def backward_weight_one_chunk(self, index: int, **_: Any) -> None:
        self._timed("W", index, lambda: self.runner.weight_grad(index))

    def _timed(self, kind: str, index: int, compute: Callable[[], T]) -> T:
        """Compute, and note when."""
        start_s = time.perf_counter()
        result = compute()
        end_s = time.perf_counter()
        self.spans.append(Span(Action(kind, self.stage_index, index), self.group_rank, start_s, end_s))
        return result

    def perform_reduce_grad(self, _: float) -> None:
        """Gradients are reduced by the stage's own ``finish`` task, after the schedule."""


class TorchPipeline(pipeline_runtime()):  # type: ignore[misc]
    """Torch's runtime over our stages and our schedule; it initialises nothing, as our graphs are ready."""

    def __init__(self, stages: Sequence[RunningStage], schedule: Schedule, forward_only: bool = False) -> None:
        super().__init__(list(stages), schedule.num_microbatches, backward_requires_autograd=False)
        self.stage_index_to_group_rank = dict(enumerate(schedule.rank_of_stage))
        self.pipeline_order_with_comms = runtime_actions(with_transfers(schedule, forward_only))
        for stage in stages:
            stage.has_backward = not forward_only
        of = {stage.stage_index: stage for stage in stages}
        take_over_sends(self, lambda stage, i: of[stage].send_ahead(i), lambda stage, i: of[stage].send_back(i))

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        return

    def run(self) -> None:
        """Walk this rank's part of the schedule once."""
        self._step_microbatches(return_outputs=False)
        for stage in self._stages:
            stage.settle()

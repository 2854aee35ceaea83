"""Steps of one compiled model on a GPU (or, to try it, a CPU): times, memory, and how long no kernel runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

import galvatron_fx as gfx
from benchmarks.accuracy.gpu_by_hand import ByHand
from benchmarks.common.small_models import Batch
from benchmarks.common.tensor_memory import TensorMemory, held_tensors

WARM_UP = 3


@dataclass(frozen=True)
class Measured:
    """Medians of seconds; bytes beside the workspaces of libraries; the share of a step in which no kernel runs."""

    compute_s: float
    update_s: float
    peak_bytes: int
    idle_share: float | None

    @property
    def step_s(self) -> float:
        """Forward, backward and update."""
        return self.compute_s + self.update_s


def workspace_bytes(device: str) -> int:
    """What the libraries of matrix products hold from their first use on."""
    if device == "cpu":
        return 0
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.ones(256, 256, device=device, dtype=dtype)
        square @ square
        del square
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


Trained = gfx.DistributedGraphModule | ByHand


def measure(model: Trained, batch: Batch, device: str, steps: int, beside_bytes: int) -> Measured:
    """Train ``steps`` after some to warm up; ``beside_bytes``: what was allocated before the model."""
    optimizer = torch.optim.AdamW(model.parameters())

    def compute() -> None:
        model.forward_backward(**batch)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        compute()
        update()

    rows = [(_timed(compute, device), _timed(update, device)) for _ in range(WARM_UP + steps)][WARM_UP:]
    compute_s, update_s = (median(column) for column in zip(*rows, strict=True))
    return Measured(compute_s, update_s, _peak_bytes(model, optimizer, step, device, beside_bytes), _idle(step, device))


def _timed(run: Callable[[], None], device: str) -> float:
    start_s = clock_s(device)
    run()
    return clock_s(device) - start_s


def clock_s(device: str) -> float:
    """The clock when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_bytes(
    model: Trained,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    device: str,
    beside_bytes: int,
) -> int:
    """The most bytes of a step: of CUDA's allocator, which rounds every tensor up to 512 bytes."""
    if device == "cpu":
        with TensorMemory(held_tensors(model.module if isinstance(model, ByHand) else model, optimizer)) as memory:
            step()
        return memory.peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - beside_bytes


def _idle(step: Callable[[], None], device: str) -> float | None:
    """The share of a step, from its first kernel to its last, in which none runs."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as traced:
        for _ in range(3):
            step()
            torch.cuda.synchronize()
            traced.step()
    events = traced.events() or ()
    # In the first step that is profiled, names of blocks are written into the program.
    last = max(event.time_range.start for event in events if event.name.startswith("ProfilerStep"))
    times = (event.time_range for event in events if event.device_type == DeviceType.CUDA)
    spans = sorted((span.start, span.end) for span in times if span.start >= last)
    if not spans:
        return None
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(1 - busy / (until - spans[0][0]))

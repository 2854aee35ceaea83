"""What a training run reports, to the terminal and TensorBoard."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.runtime.expert_loads import ExpertLoads


def peak_bytes(device: str) -> int:
    """The most memory that this process has used: of its GPU, or resident on the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


class Metrics:
    """Reports of rank 0; on other ranks nothing comes out.

    ``throughput``: what the plan trains in one of the ``batches`` of a step; ``start``: steps already done, so that
    TensorBoard drops what an interrupted run wrote beyond its last checkpoint.
    """

    def __init__(self, folder: Path | None, device: str, *, throughput: Throughput, batches: int, start: int) -> None:
        self.device, self.throughput, self.batches = device, throughput, batches
        self.is_first = dist.get_rank() == 0
        self.writer = SummaryWriter(folder, purge_step=start + 1) if self.is_first and folder else None
        self.steps, self.spent_s = 0, 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A step of training, for the speed of the next report."""
        begin_s = time.perf_counter()
        yield
        self.steps, self.spent_s = self.steps + 1, self.spent_s + time.perf_counter() - begin_s

    def report(self, step: int, loss: float, learning_rate: float, norm: float) -> None:
        """Tell of step ``step``, and of the mean speed of the steps since the last report."""
        batch_s = self.spent_s / self.steps / self.batches
        self.steps, self.spent_s = 0, 0.0
        values = {
            "loss": loss,
            "learning rate": learning_rate,
            "gradient norm": norm,
            "tokens per second": self.throughput.per_s(batch_s),
            "model flops utilisation": self.throughput.mfu(batch_s),
            "peak memory bytes": peak_bytes(self.device),
        }
        self.write(step, {f"train/{name}": value for name, value in values.items()})
        self.say(
            f"step {step}  loss {loss:.4f}  lr {learning_rate:.2e}  norm {norm:.2f}  "
            f"{values['tokens per second']:,.0f} tokens/s  mfu {values['model flops utilisation']:.1%}  "
            f"peak {format_bytes(values['peak memory bytes'])}"
        )

    def report_experts(self, step: int, loads: ExpertLoads) -> None:
        """Tell how unevenly rows came to experts in the last batch, if the model has any."""
        layers = {layer.name: layer.imbalance(len(layer.rows)) for layer in loads.layers}
        self.write(step, {f"experts/busiest over mean/{name}": most for name, most in layers.items()})
        if layers:
            self.write(step, {"experts/further rounds": loads.further_rounds})
            self.say(
                f"step {step}  busiest expert {max(layers.values()):.2f} x mean, {loads.further_rounds} further rounds"
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers for TensorBoard, at once in its file."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def say(self, text: object) -> None:
        """A line for the terminal."""
        if self.is_first:
            print(text, flush=True)

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self.writer is not None:
            self.writer.close()

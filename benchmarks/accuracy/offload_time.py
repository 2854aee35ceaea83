"""Claim: what plans with activations or optimizer states on the host, or on disk, take is what was simulated.

Plans of small models train in this process, on one core. Their copies take as long as a link of a given bandwidth
would: a clock has the processor's seconds, without those of copying, and those that a step waits for the link. Links
are so fast that computing hides them, and so slow that it does not. Prices of operators are measured, and corrected by
what the model takes with nothing on the host, so that what is compared is copies, and what runs beside them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.common.one_process import mesh_of_one
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph import host_copies
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.plan_fit import simulated
from galvatron_fx.profiling import measure_calls
from galvatron_fx.runtime import host_states
from passes.analysis.blocks import num_blocks, num_values
from passes.lowering.lower_step import Lower

NOTHING = "nothing"
WARM_UP = 2
RATES = (0.3, 1.0, 3.0)
"""Of a link: how much of what a step copies it moves in the time of a step."""


@dataclass
class Link:
    """A link to the host, both directions of which carry one copy at a time; ``blocks``: a disk instead, where whoever
    reads or writes does nothing else.
    """

    bandwidth_bytes_per_s: float
    blocks: bool = False
    moved_bytes: int = 0
    _away_s: float = 0.0  # waited, less what copying took of the processor
    _free_s: dict[int, float] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        """Seconds of the processor and of waiting."""
        return time.process_time() + self._away_s

    def start(self, source: Tensor, copy: Tensor, lane: int = 0) -> Tensor:
        """In the place of ``host_copies.start_copy``."""
        start_s = time.process_time()
        copy.copy_(source)
        self._away_s -= time.process_time() - start_s
        self.moved_bytes += copy.nbytes
        ready_s = max(self.now_s, self._free_s.get(lane, 0.0)) + copy.nbytes / self.bandwidth_bytes_per_s
        self._free_s[lane] = ready_s
        if self.blocks:
            self.wait(ready_s)
        else:
            host_copies._under_way[copy.data_ptr()] = _Event(self, ready_s)  # type: ignore[assignment]
        return copy

    def wait(self, ready_s: float) -> None:
        """Let time pass until then."""
        self._away_s += max(0.0, ready_s - self.now_s)

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Have all copies go over it."""
        stream = SimpleNamespace(wait_event=lambda event: event.synchronize())
        torch_with_streams = SimpleNamespace(
            accelerator=SimpleNamespace(current_stream=lambda *_: stream), empty_like=torch.empty_like
        )
        with (
            patch.object(host_copies, "torch", torch_with_streams),
            patch.object(host_copies, "start_copy", self.start),
            patch.object(host_states, "start_copy", self.start),
        ):
            yield


@dataclass
class _Event:
    link: Link
    ready_s: float

    def synchronize(self) -> None:
        self.link.wait(self.ready_s)


def models() -> dict[str, tuple[nn.Module, dict[str, Tensor]]]:
    """Small ones, with a batch."""
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=1024, use_cache=False, **shape))
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, use_cache=False, **none, **ends)
    ids = torch.randint(0, 1024, (4, 256))
    batch = {"input_ids": ids, "labels": ids.clone()}
    return {"LLaMA": (llama, batch), "GPT-2": (GPT2LMHeadModel(gpt2), batch)}


def plans(graph: fx.GraphModule) -> dict[str, Plan]:
    """With everything of a kind on the host."""
    counts = num_values(graph)
    kept = [Strategy(("data",), offload_entering=True, offloads=tuple(range(n)), num_values=n) for n in counts]
    on_disk = Strategy(("data",), offload_states=True, states_on_disk=True)
    return {
        NOTHING: Plan.uniform((1,), ("data",)),
        "activations": Plan.from_roles((1,), kept),
        "states": Plan.uniform((1,), ("data",), offload_states=True),
        "states, gradients folded": Plan.uniform((1,), ("data",), offload_states=True, fold_gradients=True),
        "states on disk": Plan.from_roles((1,), [on_disk] * len(counts)),
    }


@dataclass
class Training:
    """A model that trains by a plan."""

    model: gfx.DistributedGraphModule
    batch: dict[str, Tensor]
    on_disk: bool

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.fold_gradients(self.optimizer)

    def step_s(self, bandwidth_bytes_per_s: float, steps: int) -> tuple[float, float]:
        """Seconds of a step, the median, and bytes that it copies."""
        link, times = Link(bandwidth_bytes_per_s, self.on_disk), []
        with link.instead():
            for _ in range(WARM_UP + steps):
                start_s = link.now_s
                self.model.forward_backward(**self.batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
                times.append(link.now_s - start_s)
        return median(times[WARM_UP:]), link.moved_bytes / len(times)


def rows(
    name: str, cluster: gfx.Cluster, mesh: DeviceMesh, seconds: float, steps: int
) -> list[tuple[list[str], float]]:
    """A row for each plan and link, with the error of the simulation."""
    model, batch = models()[name]
    graph = gfx.capture(model, batch)
    lowered = Lower([Strategy(("data",))] * num_blocks(graph), cluster).run(graph)
    cluster = measure_calls(cluster, mesh, lowered.halves.graphs().values(), seconds=seconds)
    on_gpu = linked(cluster, 1.0)  # copies are started early and waited for late, as where computing hides them
    lines, slower, bare_s = [], 1.0, 0.0
    for what, plan in plans(graph).items():
        on_disk = "disk" in what
        with tempfile.TemporaryDirectory() as folder:
            storage = folder if on_disk else None
            compiled = gfx.compile(models()[name][0], mesh, batch, plan=plan, cluster=on_gpu, storage=storage)
            training = Training(compiled, batch, on_disk)
            step_s, moved_bytes = training.step_s(float("inf"), steps if what == NOTHING else 1)
            if what == NOTHING:
                bare_s, slower = step_s, step_s / simulated(graph, cluster, plan).step_time_s
                continue
            for rate in RATES:
                bandwidth = rate * moved_bytes / bare_s
                found_s, _ = training.step_s(bandwidth, steps)
                expected_s = slower * simulated(graph, linked(cluster, bandwidth * slower), plan).step_time_s
                error = expected_s / found_s - 1
                times = [f"{1e3 * each:.0f} ms" for each in (bare_s, expected_s, found_s)]
                lines.append(([name, what, f"{rate:g}", *times, f"{error:+.1%}"], error))
    return lines


def linked(cluster: gfx.Cluster, bandwidth_bytes_per_s: float) -> gfx.Cluster:
    """The same with a link to the host, and a disk, of so many bytes a second, beside which a GPU would compute."""
    speeds = {"host_bytes_per_s": bandwidth_bytes_per_s, "disk_bytes_per_s": bandwidth_bytes_per_s}
    return replace(cluster.having(**speeds), overlap=Overlap())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of profiling; as many a model")
    parser.add_argument("--steps", type=int, default=7, help="of each plan with each link")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False, width=200)
    console.print(f"{machine.describe()}\n")
    table = Table(
        "model", "on the host", "rate of the link", "step with nothing there", "simulated", "measured", "error"
    )
    errors = []
    with mesh_of_one() as mesh:
        cluster = gfx.measure_cluster(mesh, seconds=options.seconds)
        for name in models():
            for row, error in rows(name, cluster, mesh, options.seconds, options.steps):
                table.add_row(*row)
                errors.append(abs(error))
    console.print(table)
    console.print(f"\nmedian of the errors {median(errors):.1%}, the largest {max(errors):.1%}")


if __name__ == "__main__":
    main()

"""One rank of the plans with stages whose memory ``stage_memory.py`` measures; started by it through torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx as gfx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from benchmarks.demo.demo_task import update
from galvatron_fx.api import capture
from galvatron_fx.compiling import compile_captured
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.runtime.staged_program import StagedProgram
from passes.lowering.apply_plan import lower
from passes.lowering.lower_stages import LoweredStages
from passes.simulation.stages import SimulateStages

RANKS = 4
BATCH, SEQUENCE, VOCABULARY, HIDDEN, LAYERS, HEADS = 16, 64, 512, 128, 6, 4


@dataclass(frozen=True)
class Case:
    """A plan to measure: ``roles`` of the two mesh axes of all blocks, outermost first, what the blocks keep, and the
    schedule. ``mixed``: computes in bfloat16 and reduces gradients in float32.
    """

    model: str
    roles: tuple[str, str]
    schedule: str
    stages: int
    microbatches: int
    recompute: bool = False
    keep_gathered: bool = False
    mixed: bool = False

    def plan(self) -> gfx.Plan:
        """The plan for every block alike."""
        pipelining = Pipelining(self.stages, self.microbatches, self.schedule)
        kept = {"recompute": self.recompute, "keep_gathered": self.keep_gathered}
        return gfx.Plan.uniform((2, 2), self.roles, pipelining=pipelining, **kept)

    def policy(self) -> MixedPrecisionPolicy | None:
        """The policy of mixed precision."""
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.mixed else None


@dataclass(frozen=True)
class Peak:
    """The most tensor bytes alive on one rank."""

    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def llama() -> nn.Module:
    """LLaMA with untied embeddings."""
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """GPT-2 with tied embeddings: first and last stage hold a copy each."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=SEQUENCE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def new_batch() -> dict[str, torch.Tensor]:
    """The global batch, [BATCH, SEQUENCE]."""
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


@cache
def captured(model: str, policy: MixedPrecisionPolicy | None) -> fx.GraphModule:
    """The graph of a model, for all cases that compute in the same dtypes."""
    return capture(MODELS[model](), new_batch(), mixed_precision=policy)


def measure(case: Case, mesh: DeviceMesh) -> Peak:
    """Predict this rank's peak, and measure it on the third step, when the optimizer has its states."""
    model, batch, plan, cluster = MODELS[case.model](), new_batch(), case.plan(), gfx.Cluster.from_mesh(mesh)
    graph = captured(case.model, case.policy())
    compiled = compile_captured(model, graph, mesh, plan.with_precision(case.policy()), cluster)
    optimizer = torch.optim.AdamW(compiled.parameters())
    for _ in range(2):
        compiled.forward_backward(**batch)
        update(compiled, optimizer)
    with TensorMemory([*held_tensors(compiled, optimizer), *batch.values()]) as memory:
        compiled.forward_backward(**batch)
        update(compiled, optimizer)
    program: Any = compiled._compiled()
    assert isinstance(program, StagedProgram)
    predicted = predict(graph, plan, cluster)
    return Peak(predicted[program.pipeline.rank], memory.peak_bytes)


@cache
def predict(graph: fx.GraphModule, plan: gfx.Plan, cluster: gfx.Cluster) -> tuple[int, ...]:
    """The predicted peak of every pipeline rank, bytes."""
    lowered = lower(graph, plan, cluster)
    assert isinstance(lowered, LoweredStages)
    pipeline = plan.num_pipeline_ranks
    axes = [cluster.axes[axis] for axis in plan.pipeline_axes]
    return SimulateStages(cluster, plan.pipelining.table(pipeline), axes).run(lowered).peak_bytes


def read_cases(text: str) -> list[Case]:
    """Cases of their fields as JSON."""
    return [Case(**fields) for fields in json.loads(text)]


def measure_all(cases: Sequence[Case], path: Path, mesh: DeviceMesh) -> None:
    """On a rank: measure; rank 0 leaves the peaks of all ranks, a list a case, as JSON at ``path``."""
    torch.manual_seed(0)
    found = []
    for case in cases:
        peak = measure(case, mesh)
        peaks: list[Any] = [None] * RANKS
        dist.all_gather_object(peaks, (peak.predicted, peak.measured))
        found.append(peaks)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))


def main() -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    measure_all(read_cases(sys.argv[2]), Path(sys.argv[1]), init_device_mesh("cpu", (2, 2)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What gpu.py trains: a LLaMA of about a billion parameters, and a tiny one to try the script without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.small_models import Batch, Size, llama
from cost_models.node_cost import node_cost
from cost_models.ops import is_matmul

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Scale:
    """Sizes of the model, the sequence lengths that it is trained at, and the tokens of a batch at most."""

    width: int
    layers: int
    heads: int
    words: int
    sequences: tuple[int, ...]
    tokens: int

    def model(self) -> nn.Module:
        """The model on the CPU, float32, with fresh weights."""
        torch.manual_seed(0)
        return llama(Size(self.width, self.layers, self.heads, self.words, 1, max(self.sequences)))

    def batch(self, samples: int, sequence: int) -> Batch:
        """Token ids and labels, [samples, sequence]."""
        ids = torch.randint(self.words, (samples, sequence), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids.clone()}


SCALES = {
    "cuda": Scale(2048, 18, 16, 32000, (1024, 4096, 8192), 16384),
    "cpu": Scale(64, 3, 4, 256, (32, 64), 128),
}


def model_flops(graph: fx.GraphModule) -> int:
    """Flops of all products of a captured graph, causal attention counted half: nothing is recomputed in it."""
    calls = (node for node in graph.graph.nodes if node.op == "call_function" and is_matmul(node.target))
    return sum(int(node_cost(node, graph.meta["symbols"]).flops) for node in calls)

"""One rank of decode.py: decode steps compiled and by hand, in turns. Started through torchrun.

Arguments: a folder; what to do (JSON).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import galvatron_fx as gfx

aten = torch.ops.aten


class ByHand:
    """Megatron's split of a LLaMA: this rank's heads, columns and rows, and its part of the cache."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        config, rank, ranks = model.config, dist.get_rank(), dist.get_world_size()
        self.width, self.heads = config.hidden_size // config.num_attention_heads, config.num_attention_heads // ranks
        self.embed = model.model.embed_tokens.weight
        self.inverse = model.model.rotary_emb.inv_freq
        self.norm, self.head = model.model.norm, model.lm_head.weight.chunk(ranks)[rank].contiguous()
        self.layers = []
        for layer in model.model.layers:
            attend, mix = layer.self_attn, layer.mlp
            columns = (attend.q_proj, attend.k_proj, attend.v_proj, mix.gate_proj, mix.up_proj)
            rows = (attend.o_proj, mix.down_proj)
            split = [part.weight.chunk(ranks)[rank].contiguous() for part in columns]
            split += [part.weight.chunk(ranks, 1)[rank].contiguous() for part in rows]
            kept = [torch.zeros(batch, self.heads, length, self.width) for _ in range(2)]
            self.layers.append((layer.input_layernorm, layer.post_attention_layernorm, split, kept))
        self.length = torch.zeros((), dtype=torch.int64)
        self.places = torch.arange(length)

    def __call__(self, ids: Tensor) -> Tensor:
        """Whole logits of one more token of each request, ids [batch, 1]."""
        x = F.embedding(ids, self.embed)
        at = torch.arange(1) + self.length
        mask = torch.where(self.places <= at[:, None], 0.0, float("-inf"))[None, None]
        angles = (at[:, None].float() * self.inverse).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for before, behind, (q, k, v, gate, up, out, down), (keys, values) in self.layers:
            h = before(x)
            query, key, value = (F.linear(h, w).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (q, k, v))
            keys.index_copy_(2, at, _turned(key, cos, sin))
            values.index_copy_(2, at, value)
            mixed = F.scaled_dot_product_attention(_turned(query, cos, sin), keys, values, attn_mask=mask)
            x = x + _summed(F.linear(mixed.transpose(1, 2).flatten(2), out))
            h = behind(x)
            x = x + _summed(F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down))
        self.length += 1
        logits = F.linear(self.norm(x), self.head)
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits)
        return torch.cat(parts, -1)


def _median(seconds: list[float]) -> float:
    """Of all but the first fifth."""
    return median(seconds[len(seconds) // 5 :])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


@torch.no_grad()
def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    sizes = {"hidden_size": task["hidden"], "intermediate_size": 11 * task["hidden"] // 4}
    config = LlamaConfig(
        **sizes, num_hidden_layers=task["layers"], num_attention_heads=task["heads"], vocab_size=task["vocabulary"]
    )
    model = LlamaForCausalLM(config).eval()
    batch, ids = task["batch"], torch.zeros(task["batch"], 1, dtype=torch.int64)
    by_hand = ByHand(model, batch, task["cache"])

    def cache() -> StaticCache:
        new = StaticCache(config, max_cache_len=task["cache"])
        new.early_initialization(batch, task["heads"], by_hand.width, torch.float32, torch.device("cpu"))
        return new

    plan = gfx.Plan.uniform((dist.get_world_size(),), ("tensor",))
    given = {"input_ids": ids, "past_key_values": cache()}
    compiled: Any = gfx.compile(model, mesh, given, plan=plan, forward_only=True, compare_batches=0, kernels="torch")

    def step() -> Tensor:
        logits: Any = compiled(**given).logits
        return logits.full_tensor() if hasattr(logits, "full_tensor") else logits  # type: ignore[no-any-return]

    torch.testing.assert_close(step(), by_hand(ids), rtol=1e-3, atol=1e-4)
    contenders: dict[str, Callable[[], Tensor]] = {"by hand": lambda: by_hand(ids), "compiled": step}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(task["steps"]):
        for name, run in contenders.items():
            dist.barrier()
            start_s, start_busy_s = time.perf_counter(), time.process_time()
            run()
            times[name].append(time.perf_counter() - start_s)
            busy[name].append(time.process_time() - start_busy_s)
    if dist.get_rank() == 0:
        found = {
            name: {"step": _median(times[name]), "processor, of a rank": _median(busy[name])} for name in contenders
        }
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

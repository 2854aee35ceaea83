"""Let a causal language model of transformers go on with some prompts, on as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/generate.py --model ./Llama-3-8B --tokens 64 --prompt "Once" "In the year"

``--model``: a folder as save_pretrained writes it; without a tokenizer in it, tokens are bytes. Each rank reads the
weights and keeps its part. Rank 0 prints the plan, the texts, and tokens per second from the second of them on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache
from transformers.generation.streamers import BaseStreamer

import galvatron_fx


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each prompt")
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the most likely one")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--memory-budget", help="of a rank, as 40GB (default: that of the device)")
    return parser.parse_args(given)


def encoded(model: Path, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Callable[[Sequence[int]], str]]:
    """Token ids [prompts, longest] with padding in front, a mask of what counts, and what turns tokens into text."""
    decode: Callable[[Sequence[int]], str] = lambda tokens: bytes(tokens).decode(errors="replace")  # noqa: E731
    tokens = [list(prompt.encode()) for prompt in prompts]
    if (model / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokens, decode = tokenizer(list(prompts))["input_ids"], tokenizer.decode
    longest = max(map(len, tokens))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in tokens])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in tokens])
    return ids, mask, decode


class Clock(BaseStreamer):
    """Notes when tokens come: the first two wait for programs to be compiled."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Any) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        return


def main(given: Sequence[str] | None = None) -> None:
    """Compile, generate, print."""
    options = arguments(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    ids, mask, decode = encoded(options.model, options.prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model).eval()
    # With the cache among them, the search knows what it takes, and that a batch goes through stages at once.
    cache = StaticCache(model.config, max_cache_len=ids.shape[1] + options.tokens)
    batch = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
    compiled: Any = galvatron_fx.compile(model, mesh, batch, forward_only=True, memory_budget=options.memory_budget)
    torch.manual_seed(options.seed)
    clock = Clock()
    tokens = compiled.generate(
        ids.to(device), attention_mask=mask.to(device), max_new_tokens=options.tokens, do_sample=options.sample,
        pad_token_id=0, streamer=clock if len(ids) == 1 else None,
    )  # fmt: skip
    if dist.get_rank() == 0:
        print(compiled.plan)
        for row, seen in zip(tokens, mask, strict=True):
            print(repr(decode(row[len(seen) - int(seen.sum()) :].tolist())))
        if len(clock.seconds) > 4:
            gaps = clock.seconds[-1] - clock.seconds[3]
            print(f"{(len(clock.seconds) - 4) / gaps:.1f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Capacity planning: LLaMA-8B and 70B over 8 to 1,024 GPUs of four kinds, and how far estimates are from simulations.

    python -m benchmarks.search.sweep [--picture FILE] [--simulate N]

Prints the table, the processor seconds, and of N points spread over the table what a whole search finds there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx
from benchmarks.common.machine import describe
from galvatron_fx.sweeping.points import SweepPoint

_SIZES = {
    "LLaMA-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "LLaMA-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
_KINDS = ("A100-80GB", "H100-80GB", "B200-180GB", "L40S-48GB")
_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
_BATCH, _SEQUENCE = 1024, 4096


def _captured(sizes: dict[str, int]) -> galvatron_fx.Captured:
    config = LlamaConfig(
        vocab_size=128256, num_key_value_heads=8, max_position_embeddings=_SEQUENCE, use_cache=False, **sizes
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(_BATCH, _SEQUENCE, dtype=torch.int64, device="meta")
    return galvatron_fx.Captured(model, {"input_ids": ids, "labels": ids})


def _against_search(captured: galvatron_fx.Captured, point: SweepPoint) -> str:
    start = time.process_time()
    cluster = galvatron_fx.Cluster.preset(f"{point.devices}x{point.device}")
    plan = galvatron_fx.plan(captured, cluster, simulate_runners_up=False)
    assert plan.report is not None and point.step_s is not None
    ratio = point.step_s / plan.step_time_s
    return (
        f"{point.model} on {point.devices} {point.device}: sweep {point.step_s:.4g} s, "
        f"search {plan.report.chosen.time_s:.4g} s, "
        f"simulated {plan.step_time_s:.4g} s ({ratio - 1:+.1%}), in {time.process_time() - start:.0f} s"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--simulate", type=int, default=0, metavar="N")
    options = parser.parse_args()
    print(describe())
    start = time.process_time()
    captured = {name: _captured(sizes) for name, sizes in _SIZES.items()}
    clusters = [galvatron_fx.Cluster.preset(f"{count}x{kind}") for kind in _KINDS for count in _COUNTS]
    result = galvatron_fx.sweep(captured, clusters)
    seconds = time.process_time() - start
    print(result)
    print(f"\n{len(result.points)} points in {seconds:.1f} processor seconds, captures included")
    if options.picture:
        result.draw(options.picture)
    fitting = [point for point in result.points if point.fits]
    for point in fitting[:: max(1, len(fitting) // max(options.simulate, 1))][: options.simulate]:
        print(_against_search(captured[point.model], point), flush=True)


if __name__ == "__main__":
    main()

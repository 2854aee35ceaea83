"""A BERT of 160 layers on 64 nodes of unlike speeds, as Sky Computing trains it: even cuts and the plan's, simulated.

    python -m benchmarks.search.sky [--layers N] [--nodes N] [--slowest TIMES]

Each node has one device, from as fast as the fastest to ``--slowest`` times slower, drawn at random (Sky's simulator of
clusters draws them so, with another seed); one stage a node.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

import galvatron_fx
from benchmarks.common.machine import describe
from galvatron_fx import Cluster, Pipelining
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.cluster.device import Device

_SEED = 32
_MICROBATCHES_OF_STAGE = 2  # micro-batches for each stage
_SAMPLES, _TOKENS = 8, 128  # of a micro-batch, of a sample
_LINK = 1e-5, 10e9  # seconds and bytes a second between any two nodes
# Of a P100, one of which a node of Sky's cluster (Piz Daint) has.
_DEVICE = Device("P100", 16 * 10**9, {"float32": 9.3e12, "float64": 4.7e12}, 732e9, 0.75, 0.75, 5e-6)


def cluster_of(nodes: int, slowest: float) -> Cluster:
    """Nodes of one device each, 1 to ``slowest`` times slower than a P100."""
    times = 1 + (slowest - 1) * np.random.default_rng(_SEED).random(nodes)
    devices = [(_DEVICE.slower(float(t), f"node {number}"), 1) for number, t in enumerate(times)]
    latency_s, bandwidth = _LINK
    return Cluster.from_nodes(
        devices, latency_s=[[latency_s] * nodes] * nodes, bandwidth_bytes_per_s=[[bandwidth] * nodes] * nodes
    )


def captured_of(layers: int, batch: int) -> galvatron_fx.Captured:
    """BERT-large's layers, as many as asked for."""
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    ids = torch.zeros(batch, _TOKENS, dtype=torch.int64, device="meta")
    return galvatron_fx.Captured(model, {"input_ids": ids, "labels": ids})


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--slowest", type=float, default=4.0, help="times slower than the fastest")
    options = parser.parse_args()
    parts = _MICROBATCHES_OF_STAGE * options.nodes
    cluster = cluster_of(options.nodes, options.slowest)
    captured = captured_of(options.layers, parts * _SAMPLES)
    start_s = time.perf_counter()
    pins = {"num_stages": options.nodes, "num_microbatches": parts, "schedule": "1f1b", "recompute": True}
    plan = galvatron_fx.plan(captured, cluster, simulate_runners_up=False, **pins)
    spent_s = time.perf_counter() - start_s
    even = estimate(captured, cluster, None, replace(plan, pipelining=Pipelining(options.nodes, parts, "1f1b")))
    print(describe())
    print(f"BERT of {options.layers} layers on {options.nodes} nodes, 1 to {options.slowest:g} times slower")
    print(f"even cuts {even.simulated_s:.4g} s, the plan's {plan.step_time_s:.4g} s, in {spent_s:.0f} s of planning")
    print(f"{1 - plan.step_time_s / even.simulated_s:.1%} less time (Sky Computing: 55 %)")


if __name__ == "__main__":
    main()

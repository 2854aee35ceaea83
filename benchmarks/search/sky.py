"""A BERT of 160 layers on 64 nodes of unlike speeds, as Sky Computing trains it: even cuts and plans, simulated.

    python -m benchmarks.search.sky [--layers N] [--nodes N]

As its code (github.com/hpcaitech/SkyComputing) has it: BERT-large's layers and a classifier of three labels, a batch of
32 x 128 tokens that goes through all nodes at once (no micro-batches), one P100 a node, which sleeps 1 to 6 times as
long as it computes (``experiment/config.py``, its seed). Plans are for all nodes, and for the fastest few: the rest is
left out. Then the same with a micro-batch for each sample.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

import galvatron_fx
from benchmarks.common.machine import describe
from galvatron_fx import Cluster, Pipelining
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.cluster.device import Device

_SEED, _LONGEST_SLEEP = 35, 6  # of Sky's experiment
_SAMPLES, _TOKENS, _LABELS = 32, 128, 3
_LINK = 1e-5, 10e9  # seconds and bytes a second between any two nodes
# Of a P100, one of which a node of Sky's cluster (Piz Daint) has.
_DEVICE = Device("P100", 16 * 10**9, {"float32": 9.3e12, "float64": 4.7e12}, 732e9, 0.75, 0.75, 5e-6)


def times_of(nodes: int) -> list[float]:
    """How many times as long as a P100 each node takes: the experiment numbers its workers from 1."""
    sleeps = np.random.default_rng(_SEED).integers(low=1, high=_LONGEST_SLEEP + 1, size=nodes + 1)
    return [1.0 + float(sleep) for sleep in sleeps[1:]]


def cluster_of(times: list[float]) -> Cluster:
    """A node of one device for each of ``times``."""
    nodes, (latency_s, bandwidth) = len(times), _LINK
    devices = [(_DEVICE.slower(each, f"{each:g} times as slow"), 1) for each in times]
    return Cluster.from_nodes(
        devices, latency_s=[[latency_s] * nodes] * nodes, bandwidth_bytes_per_s=[[bandwidth] * nodes] * nodes
    )


def captured_of(layers: int) -> galvatron_fx.Captured:
    """BERT-large's layers, as many as asked for."""
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, id2label={at: str(at) for at in range(_LABELS)},
    )  # fmt: skip
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
        ids, labels = (torch.zeros(shape, dtype=torch.int64) for shape in ((_SAMPLES, _TOKENS), (_SAMPLES,)))
    return galvatron_fx.Captured(model, {"input_ids": ids, "labels": labels})


def main() -> None:
    """Print a row for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=64)
    options = parser.parse_args()
    times = times_of(options.nodes)
    captured = captured_of(options.layers)
    print(f"{describe()}\n\nBERT of {options.layers} layers, {options.nodes} nodes, {min(times):g} to {max(times):g}")
    baseline_s = None
    for parts in (1, _SAMPLES):
        kept = options.nodes
        while kept >= 8:
            fastest = times if kept == options.nodes else sorted(times)[:kept]
            cluster, start_s = cluster_of(fastest), time.perf_counter()
            pins = {"num_stages": kept, "num_microbatches": parts, "schedule": "1f1b"}
            plan = galvatron_fx.plan(captured, cluster, simulate_runners_up=False, **pins)
            spent_s = time.perf_counter() - start_s
            even_plan = replace(plan, pipelining=Pipelining(kept, parts, "1f1b"))
            even_s = estimate(captured, cluster, None, even_plan).simulated_s
            baseline_s = baseline_s or even_s
            less = f"{1 - plan.step_time_s / even_s:.1%} less than even, {1 - plan.step_time_s / baseline_s:.1%} in all"
            print(f"{parts} parts, {kept} nodes: even {even_s:.4g} s, plan {plan.step_time_s:.4g} s: {less}", end=" ")
            print(f"({spent_s:.0f} s of planning)", flush=True)
            kept //= 2


if __name__ == "__main__":
    main()

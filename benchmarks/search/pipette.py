"""Ranks in the order in which heavy traffic takes fast links, as Pipette orders them, beside the order of the nodes.

    python -m benchmarks.search.pipette [--nodes N] [--seeds N]

Nodes of eight A100, whose links to each other differ by a factor of up to four, drawn at random (Pipette measured links
of one cluster that differ as much). The plan of the order that it finds, and the same plan in the order that was given,
both simulated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import galvatron_fx
from benchmarks.common.machine import describe
from galvatron_fx import Cluster
from galvatron_fx.estimating import estimate

_DEVICES = 8
_INSIDE = 3.4e-6, 240e9  # of an A100's node: seconds, bytes a second of a device
_BETWEEN_S, _SLOWEST, _FASTEST = 14e-6, 6e9, 24e9
_BATCH, _TOKENS = 256, 1024


def cluster_of(nodes: int, seed: int) -> Cluster:
    """Nodes with links at random, the same in both directions."""
    drawn = np.random.default_rng(seed).uniform(_SLOWEST, _FASTEST, (nodes, nodes))
    bandwidth = np.minimum(drawn, drawn.T)
    latency = np.full((nodes, nodes), _BETWEEN_S)
    np.fill_diagonal(latency, _INSIDE[0])
    np.fill_diagonal(bandwidth, _INSIDE[1])
    links = {"latency_s": latency.tolist(), "bandwidth_bytes_per_s": bandwidth.tolist()}
    return Cluster.from_nodes([("A100-80GB", _DEVICES)] * nodes, **links)


def main() -> None:
    """Print both for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    config = GPT2Config(n_embd=2560, n_layer=32, n_head=32, use_cache=False, loss_type="ForCausalLM")
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).bfloat16()
    ids = torch.zeros(_BATCH, _TOKENS, dtype=torch.int64, device="meta")
    captured = galvatron_fx.Captured(model, {"input_ids": ids, "labels": ids})
    print(describe())
    for seed in range(options.seeds):
        cluster = cluster_of(options.nodes, seed)
        plan = galvatron_fx.plan(captured, cluster, simulate_runners_up=False)
        given = estimate(captured, cluster, None, replace(plan, rank_order=()))
        gain = given.simulated_s / plan.step_time_s
        pipelining = f"{plan.pipelining.num_stages} stages"
        print(
            f"seed {seed}: {pipelining}, {given.simulated_s:.4g} s as given, {plan.step_time_s:.4g} s, {gain:.2f} times"
        )


if __name__ == "__main__":
    main()

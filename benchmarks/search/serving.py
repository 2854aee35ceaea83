"""Claim: simulated servers are ordered as APEX and SARATHI found, on public shapes of traces, in minutes on a CPU.

Traces are drawn from a seed, with the medians that were published: of Azure's coding and conversation services (Patel
et al. 2024, Splitwise, section III), and of ShareGPT with its published means (Kwon et al. 2023, vLLM, section 6.1).
Lengths are log-normal and arrivals Poisson. The model is a LLaMA of 7 B parameters in bfloat16.

1. APEX (Lin et al. 2024): the best way to share out eight A100 depends on the trace, and beats the heuristic of a node,
   ``tensor`` over all of it, by up to 3.37 times.
2. SARATHI (Agrawal et al. 2023; Sarathi-Serve, 2024) on one A100: chunked prefill bounds the time between tokens, which
   whole prompts stall.
3. The same in eight stages: chunks make steps alike, so stages wait less for each other.
4. NanoFlow (Zhu et al. 2024): two half-batches overlapped, where ``tensor`` ranks communicate.
"""

from __future__ import annotations

import argparse
import time
import warnings
from math import log, sqrt
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import machine
from galvatron_fx import Cluster, Request, Serving, serve_plan
from galvatron_fx.serving.captures import CapturedRequests

LONGEST = 8192  # tokens of a prompt and its output
SHAPES = {  # median and mean of prompts and outputs
    "coding": ((1500, 2048), (13, 28)),
    "conversation": ((1020, 1155), (129, 211)),
    "ShareGPT": ((98, 161), (205, 338)),
}
HEURISTIC = "tensor 8"


def trace(shape: str, count: int, per_s: float, seed: int = 0) -> list[Request]:
    """Requests of a shape."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / per_s, count))
    lengths = [
        np.clip(rng.lognormal(log(median), sqrt(2 * log(mean / median)), count), 1, LONGEST // 2).astype(int)
        for median, mean in SHAPES[shape]
    ]
    return [Request(float(at), int(p), int(o)) for at, p, o in zip(arrivals, *lengths, strict=True)]


def layouts(model: CapturedRequests, count: int, per_s: float, picture: str | None) -> None:
    """Print all layouts of eight devices by trace."""
    print("1. Layouts of eight A100-80GB under mixed steps: seconds from arrival to the last token, p50")
    found = {}
    for shape in SHAPES:
        requests = trace(shape, count, per_s)
        found[shape] = serve_plan(model, EIGHT, requests, policies=("mixed",), rank_by="e2e_p50_s")
    names = [point.plan for point in next(iter(found.values())).points]
    print(f"{'':28}" + "".join(f"{shape:>14}" for shape in found))
    for name in sorted(names):
        print(f"{name:28}" + "".join(f"{_of(serving, name).e2e_p50_s:14.2f}" for serving in found.values()))
    for shape, serving in found.items():
        gain = _of(serving, HEURISTIC).e2e_p50_s / serving.best.e2e_p50_s
        print(f"{shape}: {serving.best.plan} is best, {HEURISTIC} takes {gain:.2f} of its time", flush=True)
    if picture:
        requests = trace("conversation", count, per_s)
        serve_plan(model, EIGHT, requests, policies=("prefill_first", "chunked")).draw(picture)


def policies(model: CapturedRequests, cluster: Cluster, plan: str, count: int, rates: tuple[float, ...]) -> None:
    """Print policies on one layout by rate of arrival."""
    print(f"\n{plan}, conversations: by requests a second")
    print(
        f"{'':24}{'tokens/s':>10}{'TTFT p50':>10}{'TTFT p99':>10}{'gap p50':>10}"
        f"{'gap p99':>10}{'e2e p50':>10}{'busy':>7}"
    )
    names = ("prefill_first", "mixed", "chunked")
    for rate in rates:
        serving = serve_plan(
            model,
            cluster,
            trace("conversation", count, rate),
            policies=names,
            chunks=(256, 512, 1024),
            only=[plan],
        )
        for point in sorted(serving.points, key=lambda point: (-names.index(point.policy), point.chunk), reverse=True):
            name = f"{rate:g}/s {point.policy} {point.chunk or ''}"
            seconds = (point.ttft_p50_s, point.ttft_p99_s, point.gap_p50_s, point.gap_p99_s, point.e2e_p50_s)
            shown = "".join(f"{1e3 * value:10.0f}" for value in seconds if value is not None)
            print(f"{name:24}{point.tokens_per_s:10.0f}{shown}{point.busy:7.0%}", flush=True)
    print("TTFT, gap and e2e in ms")


def halves(model: CapturedRequests, count: int) -> None:
    """Print what two half-batches gain under tensor."""
    print("\n4. Two half-batches overlapped, chunks of 2,048 tokens, all at once: tokens/s, and over whole batches")
    plans = ("tensor 8", "2 replicas, tensor 4")
    for cluster in (EIGHT, EIGHT.having(inside_bytes_per_s=25e9)):
        link = f"{cluster.axes[-1].bandwidth_bytes_per_s / 1e9:.0f} GB/s inside the node"
        serving = serve_plan(
            model,
            cluster,
            trace("coding", count, 1e4),
            policies=("chunked",),
            chunks=(2048,),
            halves=(False, True),
            only=plans,
        )
        for plan in plans:
            rates = {point.halves: point.tokens_per_s or 0.0 for point in serving.points if point.plan == plan}
            print(f"{plan:24} {link:28} {rates[True]:8.0f} {rates[True] / rates[False]:6.3f}", flush=True)


def _of(serving: Serving, plan: str) -> Any:
    return next(point for point in serving.points if point.plan == plan)


ONE, EIGHT = Cluster.preset("1xA100-80GB"), Cluster.preset("8xA100-80GB")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--picture", help="draw the conversations on eight devices there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{machine.describe()}\n")
    start_s = time.process_time()
    config = LlamaConfig(num_hidden_layers=options.layers, max_position_embeddings=LONGEST)
    with torch.device("meta"):
        model = CapturedRequests(LlamaForCausalLM(config).bfloat16().eval(), LONGEST)
    blocks = model.num_blocks
    print(f"captured {blocks} blocks in {time.process_time() - start_s:.0f} processor seconds\n", flush=True)
    layouts(model, options.requests, 40.0, options.picture)
    print("\n2. One A100-80GB", end="")
    policies(model, ONE, "one device", options.requests, (2.0, 4.0))
    print("\n3. Eight stages", end="")
    policies(model, EIGHT, "8 stages", options.requests, (16.0,))
    halves(model, options.requests)
    print(f"\n{time.process_time() - start_s:.0f} processor seconds in all")


if __name__ == "__main__":
    main()

"""A narrow GPT-2 on eight devices: the searches of all its configurations, and its best plan by trying every one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from passes.search.candidates import candidates
from passes.search.configurations import Configurations, Pins
from passes.search.cost_table.cost_table import ChainRequest, Pricer
from passes.search.solvers.stage_search import StageSearch
from tests.helpers import captured
from tests.passes.search.small_chains import cuts_of


def every_search(layers: int, roles: tuple[str, ...], vocabulary: int = 4096) -> Iterator[StageSearch]:
    """All configurations of a narrow GPT-2 on eight devices."""
    config = GPT2Config(n_layer=layers, n_embd=256, n_head=4, vocab_size=vocabulary, n_positions=64, use_cache=False)
    ids = torch.zeros(8, 64, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    graph, cluster = captured(model, {"input_ids": ids, "labels": ids}), Cluster.preset("8xA100-80GB")
    pricer = Pricer(graph, cluster, {})
    settings = Configurations(cluster, roles, Pins(), pricer.batch, len(pricer.marks)).all()
    keys = list(dict.fromkeys((setting.pipeline_axes, setting.num_microbatches) for setting in settings))
    requests = [ChainRequest(candidates(cluster, roles, "auto", axes), parts) for axes, parts in keys]
    chains = dict(zip(keys, pricer.chains(requests), strict=True))
    for setting in settings:
        chain = chains[setting.pipeline_axes, setting.num_microbatches]
        if not isinstance(chain, PlanError):
            yield StageSearch(chain, setting, cluster)


def exhaustive(search: StageSearch, budget: float, below_s: float) -> float:
    """Seconds of the fastest plan; as :func:`brute_force`, which times no plan that one rank alone makes too slow."""
    chain = search.chain
    blocks = np.arange(len(chain.marks))
    every = np.array(list(product(range(len(chain.strategies)), repeat=len(blocks))))
    seconds, transient = chain.time[blocks, every], chain.transient[blocks, every]
    best = below_s
    for cuts in cuts_of(search):
        ok, busy = np.ones(len(every), dtype=np.bool_), np.zeros(len(every))
        for section in search._rank_sections(cuts):
            own = list(section.blocks)
            held = section.held(chain)[np.arange(len(own)), every[:, own]]
            ok &= held.sum(axis=1) + transient[:, own].max(axis=1) <= budget
            busy = np.maximum(busy, seconds[:, own].sum(axis=1) * chain.parts)
        for row in sorted(np.flatnonzero(ok), key=lambda row: busy[row]):
            if busy[row] >= best:
                break
            best = min(best, search.times.timed(cuts, every[row].tolist()))
    return best

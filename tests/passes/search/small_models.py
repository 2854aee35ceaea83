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
from passes.search.cost_table.cost_table import CostTableRequest, Pricer
from passes.search.solvers.stage_search import Configuration, StageSearch
from tests.helpers import captured
from tests.passes.search.small_chains import cuts_of


def listed(configurations: Configurations) -> list[Configuration]:
    """All of them, those of every rung."""
    return [setting for ladder in configurations.ladders() for rung in ladder.rungs for setting in rung]


def every_search(layers: int, roles: tuple[str, ...], vocabulary: int = 4096) -> Iterator[StageSearch]:
    """All configurations of a narrow GPT-2 on eight devices."""
    config = GPT2Config(n_layer=layers, n_embd=256, n_head=4, vocab_size=vocabulary, n_positions=64, use_cache=False)
    ids = torch.zeros(8, 64, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    graph, cluster = captured(model, {"input_ids": ids, "labels": ids}), Cluster.preset("8xA100-80GB")
    pricer = Pricer(graph, cluster, {})
    settings = listed(Configurations(cluster, roles, Pins(), pricer.batch, len(pricer.block_fingerprints)))
    keys = list(dict.fromkeys((setting.pipeline_axes, setting.num_microbatches) for setting in settings))
    requests = [CostTableRequest(candidates(cluster, roles, "auto", axes), parts) for axes, parts in keys]
    cost_tables = dict(zip(keys, pricer.cost_tables(requests), strict=True))
    for setting in settings:
        costs = cost_tables[setting.pipeline_axes, setting.num_microbatches]
        if not isinstance(costs, PlanError):
            yield StageSearch(costs, setting, cluster)


def exhaustive(search: StageSearch, budget: float, below_s: float) -> float:
    """Seconds of the fastest plan; as :func:`brute_force`, which times no plan that one rank alone makes too slow."""
    costs = search.costs
    blocks = np.arange(len(costs.block_fingerprints))
    every = np.array(list(product(range(len(costs.strategies)), repeat=len(blocks))))
    seconds, transient = costs.time[blocks, every], costs.transient[blocks, every]
    best = below_s
    for cuts in cuts_of(search):
        ok, busy = np.ones(len(every), dtype=np.bool_), np.zeros(len(every))
        for section in search._rank_sections(cuts):
            own = list(section.blocks)
            held = section.held(costs)[np.arange(len(own)), every[:, own]]
            ok &= held.sum(axis=1) + transient[:, own].max(axis=1) <= budget
            busy = np.maximum(busy, seconds[:, own].sum(axis=1) * costs.num_microbatches)
        for row in sorted(np.flatnonzero(ok), key=lambda row: busy[row]):
            if busy[row] >= best:
                break
            best = min(best, search.times.timed(cuts, every[row].tolist()))
    return best

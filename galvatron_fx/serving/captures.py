"""Captured forward-only graphs of a model with its cache, at the sizes that costs are told from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from cost_models.request_costs import RequestSizes, SampledSizes
from galvatron_fx.captured import Captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import GalvatronError, InputError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.plain_model import plain_model
from passes.analysis.blocks import num_blocks
from passes.simulation.request_steps import RequestSteps

__all__ = ["CapturedRequests", "RequestInputs", "captured_graphs", "sampled_sizes", "transformers_inputs"]

RequestInputs = Callable[[int, int, int], Any]
"""From numbers of requests, of new tokens of each, and of keys that the cache holds with them, to example inputs."""

_FEWEST_KEYS = 64
_LEAST_LONGEST = 256


class CapturedRequests:
    """A model with its cache, captured once for any number of traces and clusters.

    ``longest``: the most keys that a request of them has; ``inputs``: from numbers of requests, new tokens and keys to
    example inputs with a cache that has room for so many keys (default: of a causal language model of transformers).
    It is traced when first asked for. Raises InputError for a model whose inputs are not known.
    """

    def __init__(self, model: nn.Module, longest: int, inputs: RequestInputs | None = None) -> None:
        self.name = type(plain_model(model)).__name__
        self.sizes = sampled_sizes(longest)
        self._model, self._inputs = model, inputs or transformers_inputs(model)
        self._steps: dict[tuple[Cluster, Strategy], RequestSteps | GalvatronError] = {}

    @cached_property
    def graphs(self) -> dict[RequestSizes, fx.GraphModule]:
        """The graph at each size; raises as :func:`captured_graphs`."""
        return captured_graphs(self._model, self._inputs, self.sizes)

    @property
    def longest(self) -> int:
        """The most keys that a request may have."""
        return self.sizes.keys[1]

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return num_blocks(self.graphs[self.sizes.held_out])

    def steps(self, cluster: Cluster, strategy: Strategy) -> RequestSteps:
        """What steps take on the devices of a stage; raises as :meth:`RequestSteps.of`, each time."""
        key = cluster, strategy
        if key not in self._steps:
            try:
                self._steps[key] = RequestSteps.of(self.graphs, self.sizes, cluster, strategy)
            except GalvatronError as error:
                self._steps[key] = error
        steps = self._steps[key]
        if isinstance(steps, GalvatronError):
            raise steps
        return steps


def sampled_sizes(longest: int) -> SampledSizes:
    """Sizes whose caches are from short to ``longest`` keys, between which costs have to grow evenly."""
    most = max(_LEAST_LONGEST, -(-longest // _FEWEST_KEYS) * _FEWEST_KEYS)
    middle = most // 2 // _FEWEST_KEYS * _FEWEST_KEYS
    return SampledSizes((8, 16), (16, 32), (_FEWEST_KEYS, most), RequestSizes(24, 24, middle))


def captured_graphs(model: nn.Module, inputs: RequestInputs, sizes: SampledSizes) -> dict[RequestSizes, fx.GraphModule]:
    """Return the graph at each of ``sizes``: one capture for each length of the cache.

    Raises what :func:`galvatron_fx.capture` raises, and InputError where the model changes no cache.
    """
    requests, tokens = sorted({size.requests for size in sizes.all}), sorted({size.tokens for size in sizes.all})
    captured: dict[int, Captured] = {}
    graphs: dict[RequestSizes, fx.GraphModule] = {}
    for size in sizes.all:
        if size.keys not in captured:
            captured[size.keys] = Captured(model, inputs(requests[0], tokens[0], size.keys), forward_only=True)
            _require_cache(captured[size.keys].graph())
            captured[size.keys].hold((requests[0], requests[-1]), (tokens[0], tokens[-1]))
        graphs[size] = captured[size.keys].graph(size.requests, size.tokens)
    return graphs


def _require_cache(graph: fx.GraphModule) -> None:
    if not any(port.kind == "cache" for port in signature(graph).inputs):
        raise InputError(
            "the model changes no cache among its inputs, so there is nothing to serve requests with: give inputs= "
            "that make a cache of keys and values with room for so many keys"
        )


def transformers_inputs(model: nn.Module) -> RequestInputs:
    """Token ids and a cache of fixed length on the meta device, for a causal language model of transformers.

    Raises InputError for another model, whose inputs only its owner knows.
    """
    model = plain_model(model)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise InputError(
            f"{type(model).__name__} is no model of transformers: give inputs=, a function from numbers of requests, "
            f"new tokens and keys to example inputs with a cache"
        )
    from transformers import StaticCache

    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    takes_logits = "logits_to_keep" in _parameters(model)

    def inputs(requests: int, tokens: int, keys: int) -> Mapping[str, Any]:
        meta = torch.device("meta")
        cache = StaticCache(config, max_cache_len=keys)
        cache.early_initialization(requests, heads, width, dtype, meta)
        ids = torch.zeros(requests, tokens, dtype=torch.int64, device=meta)
        given = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
        return given | ({"logits_to_keep": 1} if takes_logits else {})  # of a prompt only the last token's

    return inputs


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    from inspect import signature as python_signature

    return python_signature(model.forward).parameters

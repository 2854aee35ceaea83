"""Decide for values that every stage could compute itself, from the inputs alone, which are cheaper to pass on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from passes.analysis.dataflow import ancestors, input_only_ops


@dataclass(frozen=True)
class RelayOrRecompute:
    """Compare what it takes to compute a value again in every stage that needs it with what it takes to relay it.

    Masks and positions are quickly computed; what takes long (a spectrum of the input, say) is relayed. A value that an
    earlier stage needs as well is computed in each, as nothing travels backwards.

    ``stage_of``: the stage of a node's block; ``compute_s``: seconds of a node; ``send_s``: seconds to pass so many
    bytes to the next stage.
    """

    stage_of: Callable[[fx.Node], int]
    compute_s: Callable[[fx.Node], float]
    send_s: Callable[[int], float]

    def relayed(self, graph: fx.GraphModule) -> set[fx.Node]:
        """Return the values that follow from the inputs alone and are relayed nevertheless."""
        portable = input_only_ops(graph)
        values: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if node in portable and self._is_sent_sooner(node, portable - values):
                values.add(node)
        return values

    def _is_sent_sooner(self, node: fx.Node, portable: set[fx.Node]) -> bool:
        home = self.stage_of(node)
        users = [user for user in node.users if user.op == "call_function"]
        takers = {self.stage_of(user) for user in users}
        record = meta_of(node)
        # Gloo sends no truth values; and what another value is made of is needed wherever that one is computed.
        stays = record.multi_output or record.spec.dtype is torch.bool or any(user in portable for user in users)
        if stays or not takers - {home} or min(takers) < home:
            return False
        again_s = len(takers - {home}) * sum(map(self.compute_s, ancestors([node], portable)))
        return again_s > (max(takers) - home) * self.send_s(record.spec.size_bytes)

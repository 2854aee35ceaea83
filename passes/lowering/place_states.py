"""Say of each parameter whether it and its optimizer states live in the host's memory, or these on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from galvatron_fx.ir.graph.metadata import InputSpec, set_signature, signature
from galvatron_fx.ir.plan.strategy import Strategy, original_name


@dataclass(frozen=True)
class PlaceStates:
    """Mark the parameters of blocks whose strategy has ``offload_states``, or has these on disk, and those that are on
    the host themselves.

    The graph computes what it did: the optimizer's step follows the mark (``galvatron_fx/runtime/host_states.py``), and
    so do predictions and :class:`passes.lowering.fetch_parameters.FetchParameters`. Copies of a tied parameter are
    marked as it is.

    Rewrite: ``param w`` -> ``param w, whose states are on the host``, or on disk; ``param w, which is on the host``.

    ``strategies``: one per block; ``owners``: the block of every parameter by name, that of its first use
    (:func:`passes.analysis.dataflow.owning_blocks`).
    """

    strategies: Sequence[Strategy]
    owners: Mapping[str, int]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Mark the ports of ``graph`` in place and return it."""
        if any(strategy.offload_states for strategy in self.strategies):
            ports = signature(graph)
            set_signature(graph, ports.having(inputs=tuple(map(self._placed, ports.inputs))))
        return graph

    def _placed(self, port: InputSpec) -> InputSpec:
        block = self.owners.get(original_name(port.name)) if port.kind == "param" else None
        if block is None:
            return port
        strategy = self.strategies[block]
        away, on_disk = strategy.offload_states, strategy.states_on_disk
        on_host = strategy.offload_parameters
        return replace(port, states_on_host=away and not on_disk, states_on_disk=on_disk, on_host=on_host)

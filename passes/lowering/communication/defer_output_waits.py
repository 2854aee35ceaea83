"""Wait in backward for the reductions that make nothing but forward's results."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.graph.layout import extend_layout, has_layout
from galvatron_fx.ir.graph.local_program import record_step
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import write_call
from passes.lowering.codegen import communicates
from passes.lowering.split_forward_backward import ForwardBackward
from passes.sharding.placed_calls import verify_placed


@dataclass(frozen=True)
class DeferOutputWaits:
    """Mark the all-reduces that make nothing but results of a forward graph as open: it does not wait for them.

    Backward needs no loss, so the losses of all ranks are summed up beside it; see :class:`WaitInBackward`.

    Rewrite: ``loss = all_reduce(x, "sum", 0); return loss``, awaited there -> the same, with ``open`` in its facts.

    ``num_results``: how many outputs of the graph are results; those behind are saved for backward.
    """

    num_results: int

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Mark nodes of ``graph`` and return it."""
        output = graph.graph.output_node()
        results: tuple[fx.Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        saved = set(results[self.num_results :])
        for node in results[: self.num_results]:
            if node.target is c.all_reduce and set(node.users) == {output} and node not in saved:
                set_meta(node, meta_of(node).having(open=True))
        return graph


@dataclass(frozen=True)
class WaitInBackward:
    """Have the backward graph take forward's open results behind its other inputs, and return them behind gradients.

    They are waited for before backward communicates, so that of ranks whose peer is gone none waits for one collective
    after the other. Runs on graphs that are bound.

    Rewrite: ``(saved, tangents) -> gradients`` -> ``(saved, tangents, loss) -> (gradients, finished(loss))``.
    """

    def run(self, halves: ForwardBackward) -> ForwardBackward:
        """Rewrite the backward graph in place and return the halves."""
        graph = halves.backward.graph
        first = next((node for node in graph.nodes if communicates(node)), graph.output_node())
        behind_inputs = next(node for node in graph.nodes if node.op != "placeholder")
        given_results, waited = [], []
        for result in halves.open_results.values():
            with graph.inserting_before(behind_inputs):
                given = graph.placeholder(result.name)
            given_results.append(given)
            with graph.inserting_before(first):
                waited.append(write_call(graph, finished, (given,)))
            set_meta(given, meta_of(result).having(step=None))
            set_meta(waited[-1], meta_of(result).having(step=None, cost=None))
            if meta_of(result).placements:
                record_step(waited[-1], "wait", len(meta_of(result).placements[0]))
        output = graph.output_node()
        output.args = ((*output.args[0], *waited),)  # type: ignore[misc]
        extend_layout(halves.backward, given_results, waited)
        halves.backward.recompile()
        if has_layout(halves.backward):
            verify_placed(halves.backward, "bound", "WaitInBackward")
        return halves

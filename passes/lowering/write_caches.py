"""Write into caches in place where nothing reads what they held before, instead of copying all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from galvatron_fx.ir.graph.op_call import IN_PLACE
from passes.analysis.cache_writes import cache_writes


@dataclass(frozen=True)
class WriteCachesInPlace:
    """Let a bound graph write new keys and values into the caches that it is given.

    It is the last pass of a rank's graph, as the passes before take graphs that change nothing.

    ``inputs``, ``outputs``: as of :func:`passes.analysis.cache_writes.cache_writes`.

    Rewrite: ``k1 = index_put(k, [i], new)`` -> ``k1 = index_put_(k, [i], new)``, where nothing else takes ``k``.
    """

    inputs: Sequence[InputSpec | None]
    outputs: Sequence[OutputSpec | None]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for write in cache_writes(graph, self.inputs, self.outputs):
            write.target = IN_PLACE[write.target]
        graph.recompile()
        return graph

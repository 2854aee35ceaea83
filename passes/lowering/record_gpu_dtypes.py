"""Records of what kernels of GPUs make in another dtype than those of CPUs, on which graphs are traced."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import is_getitem

__all__ = ["RecordGpuDtypes"]

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_STATISTICS = (1, 2)  # outputs of a layer norm: mean and reciprocal of the standard deviation
_STATISTICS_READ = (3, 4)  # the same as arguments of its backward


@dataclass(frozen=True)
class RecordGpuDtypes:
    """Record float32 for the statistics of layer norms in half precision, as CUDA's kernels make them.

    A CPU's kernel makes them in the dtype of its input. The pass changes records alone, in graphs bound to GPUs.
    """

    def bind(self, graph: fx.Graph) -> None:
        """Correct the records of ``graph`` in place."""
        for node in graph.nodes:
            if node.target in (aten.native_layer_norm.default, aten.native_layer_norm_backward.default):
                self._correct(node)

    def _correct(self, norm: fx.Node) -> None:
        is_forward = norm.target is aten.native_layer_norm.default
        x = norm.args[0 if is_forward else 1]
        assert isinstance(x, fx.Node)
        if meta_of(x).spec.dtype not in _HALF:
            return
        if is_forward:
            for output in _STATISTICS:
                _widen(norm, output)
        picked = (user for user in norm.users if is_getitem(user) and user.args[1] in _STATISTICS)
        for statistic in picked if is_forward else (norm.args[i] for i in _STATISTICS_READ):
            assert isinstance(statistic, fx.Node)
            _widen(statistic, 0)
            if is_getitem(statistic):  # backward may be given all outputs of a norm, and pick there
                _widen(statistic.args[0], statistic.args[1])  # type: ignore[arg-type]


def _widen(node: fx.Node, output: int) -> None:
    """Record float32 for one output of ``node``."""
    record = meta_of(node)
    specs = list(record.specs)
    spec = specs[output]
    specs[output] = spec and replace(spec, dtype=torch.float32)
    set_meta(node, record.having(specs=tuple(specs)))

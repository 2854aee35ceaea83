"""Kernels that read memory in order."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import write_call
from passes.sharding.local_args import DENSE_ARGUMENTS

_NORMS = (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default)


@dataclass(frozen=True)
class DenseArguments:
    """Have kernels that read memory in order read it so: the traced copies that saw to it are gone (CleanGraph).

    Rewrite: ``group_norm(x, ...)`` -> ``dense = contiguous(x); group_norm(dense, ...)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for node in list(graph.graph.nodes):
            for position in DENSE_ARGUMENTS.get(node.target, ()):
                source = node.args[position]
                if source is None or _is_statistic(source):
                    continue
                with graph.graph.inserting_before(node):
                    dense = write_call(graph.graph, torch.ops.aten.contiguous.default, (source,))
                record = meta_of(source)
                like = meta_of(node).having(specs=record.specs, placements=record.placements, step=None)
                set_meta(dense, like.having(multi_output=False))
                node.update_arg(position, dense)
        return graph


def _is_statistic(source: Any) -> bool:
    """Whether a value is the mean or deviation as a norm's kernel gives it, which lies in order."""
    return source.target is operator.getitem and source.args[1] > 0 and source.args[0].target in _NORMS

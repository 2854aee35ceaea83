"""Run bound graphs on fake CUDA tensors, without a GPU, and compare every value with the record of its node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from galvatron_fx.api import capture
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.bound_ops import BoundAxis, finished
from galvatron_fx.ir.graph.metadata import TensorSpec, has_meta, meta_of
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.torch_compat.tracing import new_fake_mode
from passes.analysis.blocks import num_blocks
from passes.lowering.codegen import Codegen
from passes.lowering.lower_step import Lower
from tests.helpers import DEVICE, axes


def lowered_for_gpus(graph: fx.GraphModule, sizes: Sequence[int], strategy: Strategy) -> list[fx.GraphModule]:
    """Forward and backward of the last rank of a mesh of ``sizes``, bound to GPUs; ``graph`` is of :func:`capture`."""
    lowered = Lower([strategy] * num_blocks(graph), Cluster(DEVICE, axes(sizes)), {}).run(graph)
    codegen = Codegen([BoundAxis("", degree, degree - 1) for degree in lowered.layout.shape], Kernels("cuda"))
    with new_fake_mode():  # there is no GPU to move real constants to
        return [codegen.run(half) for half in (lowered.halves.forward, lowered.halves.backward)]


def bound_halves(
    model: nn.Module, inputs: Any, strategy: Strategy, policy: MixedPrecisionPolicy | None
) -> list[fx.GraphModule]:
    """Capture and :func:`lowered_for_gpus`, on a mesh of two ranks an axis."""
    return lowered_for_gpus(capture(model, inputs, mixed_precision=policy), [2] * len(strategy.roles), strategy)


def differences(graph: fx.GraphModule) -> list[str]:
    """Where values of ``graph`` on fake CUDA tensors are not as recorded: another device, shape or dtype.

    Fake tensors refuse operators on tensors of two devices, so a constant or a factory that stays behind is an error.
    """
    values: dict[fx.Node, Any] = {}
    problems: list[str] = []
    with new_fake_mode(), torch.no_grad(), without_guards():
        for node in graph.graph.nodes:
            if node.op == "output":
                break
            values[node] = _value(node, graph, values)
            made = values[node] if isinstance(values[node], (tuple, list)) else [values[node]]
            specs = meta_of(node).specs if has_meta(node) else ()
            for value, spec in zip(made, specs, strict=False):
                if isinstance(value, Tensor) and spec is not None:
                    problems += [f"{node} ({node.target}): {problem}" for problem in _compared(value, spec)]
    return problems


def _value(node: fx.Node, graph: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        fakes = [spec and torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in meta_of(node).specs]
        return fakes if meta_of(node).multi_output else fakes[0]
    if node.op == "get_attr":
        return torch.empty_like(getattr(graph, str(node.target)), device="cuda")
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return args[0] if node.target is finished else node.target(*args, **kwargs)  # type: ignore[operator]


def _compared(value: Tensor, spec: TensorSpec) -> Iterator[str]:
    if value.device.type != "cuda":
        yield f"is on {value.device}"
    if tuple(value.shape) != spec.shape:
        yield f"has shape {tuple(value.shape)}, and {spec.shape} is recorded"
    if value.dtype != spec.dtype:
        yield f"is {value.dtype}, and {spec.dtype} is recorded"


@contextmanager
def without_guards() -> Iterator[None]:
    """``Tensor.contiguous`` looks for the GPU before it looks whether the tensor is a fake one."""

    def contiguous(x: Tensor, **_: Any) -> Tensor:
        return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)

    with mock.patch.object(Tensor, "contiguous", contiguous):
        yield

"""Graphs that were traced for CPUs run on GPUs once they are bound to them: seen on fake CUDA tensors, without a GPU.

Fake tensors refuse operators on tensors of two devices, so a constant or a factory that stays behind would show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from galvatron_fx.api import capture
from galvatron_fx.ir.annotations import facts, has_facts
from galvatron_fx.ir.attention import attention, attention_backward
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.kernels import Kernels
from galvatron_fx.ir.random_ops import random_uniform
from galvatron_fx.ir.strategy import Strategy
from galvatron_fx.ir.torch_compat import new_fake_mode
from passes.codegen import BoundAxis, Codegen, finished
from passes.find_blocks import num_blocks
from passes.lower import Lower
from tests.helpers import DEVICE, axes
from tests.models import zoo

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def bound_halves(
    model: nn.Module, inputs: Any, strategy: Strategy, policy: MixedPrecisionPolicy | None
) -> list[fx.GraphModule]:
    """Forward and backward of the last rank of a mesh of two, bound to GPUs."""
    graph = capture(model, inputs, mixed_precision=policy)
    lowered = Lower([strategy] * num_blocks(graph), Cluster(DEVICE, axes([2])), {}).run(graph)
    codegen = Codegen([BoundAxis("", degree, degree - 1) for degree in lowered.layout.shape], Kernels("cuda"))
    with new_fake_mode():  # there is no GPU to move real constants to
        return [codegen.run(half) for half in (lowered.halves.forward, lowered.halves.backward)]


def check(graph: fx.GraphModule) -> None:
    """Run ``graph`` on fake CUDA tensors; every value is on the GPU and has the shape that its facts say."""
    values: dict[fx.Node, Any] = {}
    with new_fake_mode(), torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "output":
                return
            if node.op == "placeholder":
                specs = facts(node).specs
                fakes = [spec and torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for spec in specs]
                values[node] = fakes if facts(node).multi_output else fakes[0]
                continue
            if node.op == "get_attr":
                values[node] = torch.empty_like(getattr(graph, str(node.target)), device="cuda")
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = args[0] if node.target is finished else node.target(*args, **kwargs)
            made = values[node] if isinstance(values[node], (tuple, list)) else [values[node]]
            for value, spec in zip(made, facts(node).specs if has_facts(node) else (), strict=False):
                if isinstance(value, Tensor):
                    assert value.device.type == "cuda", f"{node} is on {value.device}"
                    assert spec is None or tuple(value.shape) == spec.shape, f"{node} is {value.shape}"


@pytest.fixture(autouse=True)
def without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Tensor.contiguous`` looks for the GPU before it looks whether the tensor is a fake one."""
    dense = torch.contiguous_format
    monkeypatch.setattr(Tensor, "contiguous", lambda x, **_: x if x.is_contiguous() else x.clone(memory_format=dense))


@pytest.mark.parametrize("name", zoo.MODELS)
def test_whole_models(name: str) -> None:
    model, inputs = zoo.MODELS[name]()
    for half in bound_halves(model.float(), _floats(inputs), Strategy(("tensor",), recompute=True), None):
        check(half)


def test_mixed_precision_takes_flash_attention() -> None:
    model, inputs = zoo.llama()
    halves = bound_halves(model.float(), inputs, Strategy(("zero",)), BF16)
    for half in halves:
        check(half)
    called = [{node.target for node in half.graph.nodes} for half in halves]
    assert attention in called[0] and attention_backward in called[1]


def test_dropout_draws_on_the_gpu() -> None:
    model, inputs = zoo.gpt2(resid_pdrop=0.1, attn_pdrop=0.1)
    halves = bound_halves(model.train().float(), inputs, Strategy(("data",)), None)
    assert any(node.target is random_uniform for node in halves[0].graph.nodes)
    for half in halves:
        check(half)


def _floats(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}

"""Masks that a model builds of constants become the attention kernel's own causal mode; others stay."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.testing import FileCheck
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from galvatron_fx.ir.graph.metadata import meta_of
from passes.frontend.capture.capture import Capture
from passes.frontend.find_blocks import FindBlocks
from passes.frontend.fold_causal_masks import FoldCausalMasks
from tests.helpers import assert_exact, one_device, simulate, uniform

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "head_dim": 8,
}


class Attention(nn.Module):
    """Attention of a projected input to itself (or to its first ``keys`` positions) under a mask made by a function."""

    def __init__(self, mask: Any, keys: int = 6) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.mask, self.keys = mask, keys

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        return F.scaled_dot_product_attention(q, q[:, :, : self.keys], x[:, :, : self.keys], self.mask(x)).sum()


def folded(mask: Any, keys: int = 6, **options: int) -> fx.GraphModule:
    graph = Capture(symbolic=False).run(Attention(mask, keys), (torch.randn(3, 2, 6, 8),))
    return FoldCausalMasks(**options).run(graph)


def attention_calls(graph: fx.GraphModule) -> list[tuple[bool, bool]]:
    """(causal, masked) of each attention call."""
    found = []
    for node in graph.graph.nodes:
        if node.target in ATTENTION:
            at = 4 if node.target is ATTENTION[0] else 7
            found.append((len(node.args) > at and bool(node.args[at]), "attn_mask" in node.kwargs))
    return found


def causal(x: Tensor) -> Tensor:
    return torch.ones(6, 6, dtype=torch.bool).tril()


def causal_float(x: Tensor) -> Tensor:
    return torch.full((3, 1, 6, 6), torch.finfo(x.dtype).min).triu(1)


def per_sequence(x: Tensor) -> Tensor:
    """Each sequence of the batch another window."""
    steps = torch.arange(6)
    distance = steps[:, None] - steps
    return ((distance >= 0) & (distance < 4 + torch.arange(3)[:, None, None, None])).expand(3, 1, 6, 6)


def window(x: Tensor) -> Tensor:
    distance = torch.arange(6)[:, None] - torch.arange(6)
    return (distance >= 0) & (distance < 3)


class TestGraph(expecttest.TestCase):
    def test_forward_and_backward(self) -> None:
        graph = folded(causal)
        nodes = [node for node in graph.graph.nodes if node.target in ATTENTION or node.target is aten.where.self]
        text = "\n".join(
            f"{n.target.__name__.removeprefix('_scaled_dot_product_')}{n.args} {dict(n.kwargs)}" for n in nodes
        )
        self.assertExpectedInline(
            text,
            """\
flash_attention_for_cpu.default(view_1, view_1, primals_3, 0.0, True) {}
flash_attention_for_cpu_backward.default(expand, view_1, view_1, primals_3, getitem, getitem_1, 0.0, True) {}""",
        )


@pytest.mark.parametrize("mask", [causal, causal_float])
def test_causal_masks_become_a_flag(mask: Any) -> None:
    graph = folded(mask)
    assert attention_calls(graph) == [(True, False)] * 2
    FileCheck().check_not("arange").check_not("tril").check_not("full").run(graph.code)


@pytest.mark.parametrize("mask", [lambda x: torch.ones(6, 6, dtype=torch.bool), lambda x: torch.zeros(3, 1, 1, 6)])
def test_masks_that_mask_nothing_go(mask: Any) -> None:
    assert attention_calls(folded(mask)) == [(False, False)] * 2


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (window, 6),
        (per_sequence, 6),
        (lambda x: torch.ones(6, 6, dtype=torch.bool).triu(), 6),
        (lambda x: -torch.arange(6.0)[None], 6),  # a bias, not a mask
        (lambda x: torch.arange(6)[None] < 1, 6),  # one row, equal to the first of a causal mask
        (lambda x: torch.ones(6, 4, dtype=torch.bool).tril(), 4),  # more queries than keys
        (lambda x: causal(x) & (x[:, :1, :, 0] > 0)[:, :, None], 6),  # depends on the input
    ],
)
def test_other_masks_stay(mask: Any, keys: int) -> None:
    assert attention_calls(folded(mask, keys)) == [(False, True)] * 2


def looked_up(x: Tensor) -> Tensor:
    """A causal mask by positions that are looked up, equal in all rows of the batch."""
    positions = torch.arange(6).expand(3, 6)
    rows, batch = torch.arange(6), torch.arange(3)[:, None, None]
    return (positions[batch, rows] <= positions[batch, rows[:, None]])[:, None]


@pytest.mark.parametrize("mask", [causal, causal_float, looked_up, lambda x: window(x) | causal(x)])
def test_masks_of_diagonals_are_not_evaluated(mask: Any) -> None:
    assert attention_calls(folded(mask, most_elements=0)) == [(True, False)] * 2


def counted(x: Tensor) -> Tensor:
    """A causal mask of positions that are sums."""
    ones = torch.ones(6, 6)
    return ones.cumsum(1) <= ones.cumsum(0)


def test_masks_too_large_to_evaluate_stay() -> None:
    assert attention_calls(folded(counted, most_elements=35)) == [(False, True)] * 2
    assert attention_calls(folded(counted, most_elements=36)) == [(True, False)] * 2


# ---- whole models --------------------------------------------------------------------------------------------------


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (4, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def model_of(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[name]
    return model(config(**{**SIZES, "use_cache": False, **changes})).double()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_masks_fold_and_the_model_stays_exact(name: str) -> None:
    model, inputs = model_of(name), tokens()
    graph = FoldCausalMasks().run(Capture().run(model, inputs))
    assert attention_calls(graph) == [(True, False)] * 4
    assert all(node.target is not aten.le.Tensor for node in graph.graph.nodes)
    graph = FindBlocks().run(graph)
    expected = one_device(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected, name)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "tensor"), {}), expected, name)


def test_sliding_window_stays() -> None:
    graph = FoldCausalMasks().run(Capture(symbolic=False).run(model_of("mistral", sliding_window=3), tokens()))
    assert attention_calls(graph) == [(False, True)] * 4


def test_padding_mask_stays() -> None:
    inputs = {**tokens(), "attention_mask": torch.ones(4, 8, dtype=torch.int64)}
    graph = FoldCausalMasks().run(Capture(symbolic=False).run(model_of("llama"), inputs))
    assert attention_calls(graph) == [(False, True)] * 4


def test_a_new_cache_leaves_no_trace() -> None:
    graph = Capture(symbolic=False).run(model_of("llama", use_cache=True), tokens())
    assert all(node.op != "get_attr" for node in graph.graph.nodes)
    joins = [node for node in graph.graph.nodes if node.target is aten.cat.default]
    assert joins and all(meta_of(source).spec.numel for node in joins for source in node.args[0])

"""Costs of operators: against torch's own counter, with symbols as with numbers, and by hand where torch has none."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers operators)
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cost_models.ops import TensorFacts, is_matmul, op_cost, op_time_s
from galvatron_fx.errors import ClusterError, InputError
from galvatron_fx.ir.cluster.cluster import Cluster, Device
from galvatron_fx.ir.graph.metadata import FREE, OpCost

aten = torch.ops.aten
A100 = Cluster.preset("1xA100-80GB").device
b, s = sympy.symbols("b s", positive=True, integer=True)


def fact(*shape: Any, dtype: torch.dtype = torch.float32) -> TensorFacts:
    return TensorFacts(tuple(shape), dtype)


def facts_in(tree: Any) -> list[TensorFacts]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, TensorFacts)]


def cost_of(target: Any, *args: Any, out: Any, **kwargs: Any) -> OpCost:
    """The cost of a call with facts for tensors."""
    return op_cost(target, args, kwargs, facts_in((args, kwargs)), facts_in(out))


class Priced(TorchDispatchMode):
    """Add up the flops of matrix products, by ``op_cost``, of all that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        facts = tree_map(lambda x: TensorFacts(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, args)
        results = tree_map(lambda x: TensorFacts(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, out)
        cost = op_cost(func, facts, kwargs, facts_in(facts), facts_in(results))
        assert all(type(value) is int and value >= 0 for value in (cost.flops, cost.read_bytes, cost.written_bytes))
        self.flops += cost.flops if is_matmul(func) else 0
        return out


def linear_layers() -> torch.Tensor:
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.GELU(), torch.nn.Linear(12, 3)
    )
    return F.cross_entropy(layers(torch.randn(5, 8)), torch.randint(3, (5,)))


def batched_products() -> torch.Tensor:
    x, y = (torch.randn(shape, requires_grad=True) for shape in ((4, 5, 6), (4, 6, 7)))
    return (torch.baddbmm(torch.zeros(4, 5, 7), x, y).softmax(-1) @ y.transpose(1, 2)).sum()


def convolutions() -> torch.Tensor:
    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    for layer in (torch.nn.Conv2d(4, 6, 3, stride=2, padding=1), torch.nn.ConvTranspose2d(6, 5, 3, stride=2)):
        x = layer(x)
    return x.sum()


def embedded() -> torch.Tensor:
    table = torch.nn.Embedding(11, 8)
    return (table(torch.randint(11, (2, 3))) @ torch.randn(8, 8)).sum()


@pytest.mark.parametrize("model", [linear_layers, batched_products, convolutions, embedded])
def test_a_training_step_has_the_flops_that_torch_counts(model) -> None:
    torch.manual_seed(0)
    with flop_counter.FlopCounterMode(display=False) as counted, Priced() as priced:
        model().backward()
    assert priced.flops == counted.get_total_flops() > 0


def test_a_grouped_convolution_has_the_forward_that_torch_counts() -> None:
    with torch.no_grad(), flop_counter.FlopCounterMode(display=False) as counted, Priced() as priced:
        torch.nn.Conv1d(6, 8, 3, groups=2)(torch.randn(2, 6, 10))
    assert priced.flops == counted.get_total_flops() > 0


def test_the_backward_of_a_grouped_convolution_takes_twice_its_forward() -> None:
    x, w, out = fact(2, 6, 10), fact(8, 3, 3), fact(2, 8, 8)
    shape = ([1], [0], [1], False, [0], 2)
    forward = cost_of(aten.convolution.default, x, w, None, *shape, out=out)
    masks = [[True, True, True], [False, True, False], [False, False, True]]
    backward = [
        cost_of(aten.convolution_backward.default, out, x, w, [8], *shape, mask, out=(x, w)).flops for mask in masks
    ]
    assert backward == [2 * forward.flops, forward.flops, 0]


Q, K, V = (2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_kernels_have_the_flops_that_torch_counts(kind) -> None:
    q, k, v, out = fact(*Q), fact(*K), fact(*V), fact(2, 6, 5, 4)
    packet = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    arguments = {"flash": (), "efficient": (None, True), "cudnn": (None, True)}[kind]
    assert cost_of(packet.default, q, k, v, *arguments, out=out).flops == flop_counter.flop_registry[packet](Q, K, V)
    counted = flop_counter.flop_registry[backward](out.shape, Q, K, V)
    assert cost_of(backward.default, out, q, k, v, out=(q, k, v)).flops == counted


def test_attention_on_the_cpu_counts_alike_and_causal_attention_half() -> None:
    q, k, v, out = fact(*Q), fact(*K), fact(*V), fact(2, 6, 5, 4)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    full = flop_counter.sdpa_flop_count(Q, K, V)
    full_backward = flop_counter.sdpa_backward_flop_count(out.shape, Q, K, V)
    saved = (fact(*out.shape), fact(2, 6, 5))
    assert cost_of(forward, q, k, v, out=out).flops == full
    assert cost_of(forward, q, k, v, is_causal=True, out=out).flops * 2 == full
    assert cost_of(forward, q, k, v, 0.0, True, out=out).flops * 2 == full
    assert cost_of(backward, out, q, k, v, *saved, 0.0, False, out=(q, k, v)).flops == full_backward
    assert cost_of(backward, out, q, k, v, *saved, 0.0, True, out=(q, k, v)).flops * 2 == full_backward


def calls(n: Any, m: Any) -> list[OpCost]:
    """Costs of many operators at sizes n and m, numbers or symbols."""
    x, w, ids = fact(n, m, 8), fact(8, 6), fact(n, m, dtype=torch.int64)
    flat, heads = fact(n * m, 8), fact(n, 4, m, 8)
    image, kernel = fact(n, 3, m, m), fact(5, 3, 2, 2)
    made = fact(n, 5, m - 1, m - 1)
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return [
        cost_of(aten.mm.default, flat, w, out=fact(n * m, 6)),
        cost_of(aten.addmm.default, fact(6), flat, w, out=fact(n * m, 6)),
        cost_of(aten.bmm.default, x, fact(n, 8, m), out=fact(n, m, m)),
        cost_of(aten.linear.default, x, fact(6, 8), out=fact(n, m, 6)),
        cost_of(aten.einsum.default, "bsh,ho->bso", [x, w], out=fact(n, m, 6)),
        cost_of(aten.convolution.default, image, kernel, None, *geometry, out=made),
        cost_of(
            aten.convolution_backward.default, made, image, kernel, None, *geometry, [True] * 3, out=[image, kernel]
        ),
        cost_of(flash.default, heads, heads, heads, 0.0, True, out=[heads, fact(n, 4, m)]),
        cost_of(aten.embedding.default, fact(100, 8), ids, out=x),
        cost_of(aten.native_layer_norm.default, x, [8], None, None, 1e-5, out=[x, fact(n, m, 1), fact(n, m, 1)]),
        cost_of(aten._softmax.default, x, -1, False, out=x),
        cost_of(aten.add.Tensor, x, x, out=x),
        cost_of(aten.sum.dim_IntList, x, [0, 1], out=fact(8)),
        cost_of(aten.zeros_like.default, x, out=x),
        cost_of(
            aten.nll_loss_forward.default, flat, fact(n * m, dtype=torch.int64), None, 1, -100, out=[fact(), fact()]
        ),
    ]


@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_symbols_and_numbers_agree(n, m) -> None:
    for symbolic, concrete in zip(calls(b, s), calls(n, m), strict=True):
        for field in ("flops", "read_bytes", "written_bytes"):
            value, expected = getattr(symbolic, field), getattr(concrete, field)
            assert type(expected) is int
            assert expected >= 0
            assert sympy.sympify(value).subs({b: n, s: m}) == expected


def test_the_numbers_of_a_matrix_product() -> None:
    cost = cost_of(aten.mm.default, fact(b, 4), fact(4, 6), out=fact(b, 6))
    assert cost == OpCost(48 * b, 16 * b + 96, 24 * b)


def test_lookups_read_what_they_look_up() -> None:
    table, ids, out = fact(50000, 8), fact(2, 3, dtype=torch.int64), fact(2, 3, 8)
    assert cost_of(aten.embedding.default, table, ids, out=out) == OpCost(0, 48 + 192, 192)
    logits, targets = fact(6, 50000), fact(6, dtype=torch.int64)
    loss = cost_of(aten.nll_loss_forward.default, logits, targets, None, 1, -100, out=[fact(), fact()])
    assert loss.read_bytes == 24 + 48
    back = cost_of(aten.nll_loss_backward.default, fact(), logits, targets, None, 1, -100, fact(), out=logits)
    assert (back.read_bytes, back.written_bytes) == (4 + 48 + 4, 1200000)


def test_likes_read_nothing_and_copies_compute_nothing() -> None:
    x = fact(3, 5)
    assert cost_of(aten.zeros_like.default, x, out=x) == OpCost(0, 0, 60)
    assert cost_of(aten.clone.default, x, out=x) == OpCost(0, 60, 60)
    assert cost_of(aten.arange.default, 7, out=fact(7)) == OpCost(0, 0, 28)


def test_reductions_take_a_flop_an_input_and_unknown_operators_a_flop_an_output() -> None:
    x = fact(3, 5)
    assert cost_of(aten.sum.default, x, out=fact()) == OpCost(15, 60, 4)
    assert cost_of(aten.add.Tensor, x, fact(5), out=x) == OpCost(15, 80, 60)
    assert cost_of(aten.cdist_fake if hasattr(aten, "cdist_fake") else aten.erfinv.default, x, out=x).flops == 15
    assert cost_of(print, x, out=x) == OpCost(15, 60, 60)


def test_products_of_groups_and_of_three_tensors() -> None:
    grouped = aten._grouped_mm.default
    assert cost_of(grouped, fact(10, 4), fact(3, 4, 6), fact(3), out=fact(10, 6)).flops == 2 * 10 * 4 * 6
    assert cost_of(grouped, fact(4, 10), fact(10, 6), fact(3), out=fact(3, 4, 6)).flops == 2 * 10 * 4 * 6
    backward = torch.ops.transformers.grouped_mm_fallback_backward.default
    gradients = [fact(10, 4), fact(3, 4, 6)]
    assert cost_of(backward, fact(10, 4), fact(3, 4, 6), fact(3), fact(10, 6), out=gradients).flops == 4 * 10 * 4 * 6
    assert is_matmul(backward)
    einsum = aten.einsum.default
    assert cost_of(einsum, "...i, ij -> ...j", [fact(b, s, 4), fact(4, 6)], out=fact(b, s, 6)).flops == 48 * b * s
    assert cost_of(einsum, "ij,jk,kl->il", [fact(2, 3), fact(3, 4), fact(4, 5)], out=fact(2, 5)).flops == 240
    assert cost_of(einsum, "ij->ji", [fact(2, 3)], out=fact(3, 2)).flops == 6


@pytest.mark.parametrize(
    "target",
    [
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.permute.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.detach.default,
        aten.alias.default,
        aten.split.Tensor,
        aten.empty_like.default,
        operator.getitem,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    ],
)
def test_what_moves_nothing_is_free(target) -> None:
    assert cost_of(target, fact(3, b), out=fact(b, 3)) == FREE
    assert not is_matmul(target)


@pytest.mark.parametrize("target", [operator.mul, aten.sym_size.int, torch.sym_max])
def test_arithmetic_on_sizes_is_free(target) -> None:
    assert cost_of(target, 3, 4, out=()) == FREE


def test_time_is_a_roofline_with_an_overhead() -> None:
    device = Device("d", 10**9, {"float32": 1e9, "bfloat16": 1e10}, 1e8, 0.5, 0.25, 1e-3)
    assert op_time_s(OpCost(10**9, 0, 8), torch.bfloat16, device, "matmul") == pytest.approx(0.2 + 1e-3)
    assert op_time_s(OpCost(10**9, 0, 8), torch.bfloat16, device, "pointwise") == pytest.approx(1.0 + 1e-3)
    assert op_time_s(OpCost(1, 10**8, 10**8), "float32", device, "matmul") == pytest.approx(8.0 + 1e-3)
    assert op_time_s(FREE, "bfloat16", device, "matmul") == 0.0


def test_times_of_many_sizes_come_at_once() -> None:
    flops, moved = np.array([0.0, 1e9, 1e15]), np.array([0.0, 1e6, 1e6])
    seconds = op_time_s(OpCost(flops, moved, moved), torch.bfloat16, A100, "matmul")
    one_by_one = [op_time_s(OpCost(f, m, m), torch.bfloat16, A100, "matmul") for f, m in zip(flops, moved, strict=True)]
    assert isinstance(seconds, np.ndarray)
    assert seconds.tolist() == one_by_one


@given(
    st.integers(0, 10**15), st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["matmul", "add", "clone"])
)
def test_more_work_never_takes_less_time(flops, read, written, kind) -> None:
    less = op_time_s(OpCost(flops, read, written), "float16", A100, kind)
    for more in (OpCost(2 * flops, read, written), OpCost(flops, 2 * read, written), OpCost(flops, read, written + 1)):
        assert op_time_s(more, "float16", A100, kind) >= less


def test_a_cost_with_symbols_has_no_time() -> None:
    with pytest.raises(InputError, match="holds symbols; evaluate it"):
        op_time_s(OpCost(2 * b, 1, 1), torch.float32, A100, "pointwise")


def test_a_dtype_without_a_rate_has_no_time() -> None:
    device = Device("d", 10**9, {"bfloat16": 1e10}, 1e8, 0.5, 0.25, 1e-3)
    with pytest.raises(ClusterError, match="no rate for float32 or wider"):
        op_time_s(OpCost(1, 1, 1), torch.float32, device, "pointwise")

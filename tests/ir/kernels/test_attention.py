"""Attention of other devices says what the CPU's kernel says, and picks kernels that exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.ir.kernels import attention as a
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.torch_compat.tracing import new_fake_mode
from galvatron_fx.ir.torch_compat.versions import torch_version
from tests.helpers import assert_exact, captured, one_device, simulate, uniform

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def tensors(length: int = 16, query_heads: int = 4, key_heads: int = 4) -> list[Tensor]:
    """Query, key, value and a gradient of the output, [batch, heads, sequence, width], sequence before heads in
    memory.
    """
    generator = torch.Generator().manual_seed(0)
    heads = (query_heads, key_heads, key_heads, query_heads)
    return [torch.randn(2, length, n, 8, generator=generator, dtype=torch.float64).transpose(1, 2) for n in heads]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "is_causal, mask, scale",
    [(False, None, None), (True, None, 0.3), (False, torch.full((2, 1, 16, 16), -1e9).triu(1).double(), None)],
)
def test_plain_products_are_the_kernel_of_the_cpu(
    is_causal: bool, mask: Tensor | None, scale: float | None, key_heads: int
) -> None:
    query, key, value, grad = tensors(key_heads=key_heads)
    more: dict[str, Any] = {"attn_mask": mask, "scale": scale}
    out, sums = FORWARD(query, key, value, 0.0, is_causal, **more)
    expected = BACKWARD(grad, query, key, value, out, sums, 0.0, is_causal, **more)
    found = a.attention(query, key, value, 0.0, is_causal, **more)
    torch.testing.assert_close(found, (out, sums))
    gradients = a.attention_backward(grad, query, key, value, *found, 0.0, is_causal, **more)
    torch.testing.assert_close(gradients, tuple(expected))


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    "dtype, masked, queries, kernel",
    [
        (torch.bfloat16, False, 40, a.FLASH),
        (torch.bfloat16, False, 24, a.EFFICIENT),  # causal, and not square
        (torch.bfloat16, True, 40, a.EFFICIENT),
        (torch.float32, True, 40, a.EFFICIENT),
        (torch.float32, False, 40, a.EFFICIENT),
        (torch.float64, False, 40, a.PLAIN),
    ],
)
def test_gpu_kernels_make_the_shapes_of_the_cpu(
    dtype: torch.dtype, masked: bool, queries: int, kernel: str, key_heads: int
) -> None:
    """On fake tensors: which kernel runs, and that what it takes and gives has the right shape, dtype and device."""
    with new_fake_mode(), torch.no_grad():
        query = torch.empty(2, queries, 4, 32, dtype=dtype, device="cuda").transpose(1, 2)
        key, value = (torch.empty(2, 40, key_heads, 32, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(2))
        mask = torch.empty(2, 1, queries, 40, dtype=dtype, device="cuda") if masked else None
        assert a.kernel_of(query, key, value, not masked, mask) == kernel
        out, sums = a.attention(query, key, value, 0.0, not masked, attn_mask=mask)
        gradients = a.attention_backward(
            torch.empty_like(out), query, key, value, out, sums, 0.0, not masked, attn_mask=mask
        )
    assert out.shape == query.shape and sums.shape == (2, 4, queries)
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
    assert {t.device.type for t in (out, sums, *gradients)} == {"cuda"}
    assert {t.dtype for t in (out, *gradients)} == {dtype}


def test_only_attention_is_another_operator() -> None:
    assert Kernels("cpu").of(aten.mm.default, (), {}) is aten.mm.default
    assert Kernels("cuda").of(FORWARD, (), {}) is a.attention
    assert Kernels("cuda").of(aten.mm.default, (), {}) is aten.mm.default


@pytest.mark.parametrize("position", range(3))
def test_tensors_may_lie_in_any_way(position: int) -> None:
    """The kernel itself takes the elements of a row to lie side by side, and reads others' where they do not."""
    query, key, value, grad = tensors()
    out, sums = FORWARD(query, key, value)
    expected = BACKWARD(grad, query, key, value, out, sums, 0.0, False)
    inputs = [query, key, value]
    inputs[position] = columns_side_by_side(inputs[position])
    looks = torch.allclose(FORWARD(*inputs)[0], out)
    has_learnt = position > 0 and torch_version() >= (2, 14)  # keys and values; not queries
    assert looks == has_learnt, "torch's kernel looks now: cpu_attention.py can go"
    kernels = Kernels()
    torch.testing.assert_close(kernels.of(FORWARD, [], {})(*inputs), (out, sums))
    for kept in (out, columns_side_by_side(out)):
        gradients = kernels.of(BACKWARD, [], {})(grad, *inputs, kept, sums, 0.0, False)
        torch.testing.assert_close(gradients, tuple(expected))


class Copying(nn.Module):
    """Attention and a norm of what the model itself has brought in order."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = nn.Conv1d(8, 24, 1), nn.Parameter(torch.rand(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        channels = (part.unflatten(1, (2, 4)) for part in self.heads(x).chunk(3, 1))
        out = nn.functional.scaled_dot_product_attention(*(part.transpose(2, 3).contiguous() for part in channels))
        normed = nn.functional.group_norm(out.transpose(2, 3).flatten(1, 2), 2, self.scale[:, 0].contiguous())
        return (normed * x).sigmoid().square().mean()


@pytest.mark.parametrize("role", ["data", "tensor"])
def test_copies_that_put_elements_side_by_side_are_not_missed(role: str) -> None:
    model = Copying().double()
    inputs = (torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
    graph = captured(model, inputs)
    assert any(node.target is FORWARD for node in graph.graph.nodes), "the trace attends by products"
    got = simulate(graph, model, inputs, (2,), uniform(graph, role), {})
    assert_exact(got, one_device(model, inputs))


def columns_side_by_side(x: Tensor) -> Tensor:
    """The same numbers, with those of the last dim far apart in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)

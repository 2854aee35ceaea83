"""Gradients of slices that cover a dim are put together; others, and sums that something else takes, are left alone."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import fx, nn

from passes.frontend.join_slices import JoinSlices
from tests.graphs import Builder, listing
from tests.helpers import assert_exact, captured, one_device, simulate, uniform

aten = torch.ops.aten


def _slice(build: Builder, x: fx.Node, *bounds: Any, size: int = 8) -> fx.Node:
    """The gradient of ``[2, size]`` of a slice along its last dim."""
    return build.call(aten.slice_backward.default, x, [2, size], 1, *bounds)


class TestGraph(expecttest.TestCase):
    def test_halves(self) -> None:
        """As a rotary embedding has them, beside the gradient of the whole."""
        build = Builder()
        x, y, z = build.input("x", (2, 4)), build.input("y", (2, 4)), build.input("z", (2, 8))
        halves = build.call(aten.add.Tensor, _slice(build, x, 4, 2**63 - 1, 1), _slice(build, y, 0, 4, 1))
        graph = build.finish(("output", "0", build.call(aten.add.Tensor, halves, z)))
        self.assertExpectedInline(
            listing(JoinSlices().run(graph)),
            """\
x: [2, 4]
y: [2, 4]
z: [2, 8]
cat_default = cat([y, x], 1): [2, 8]
add_1 = add.Tensor(cat_default, z): [2, 8]
return [add_1]""",
        )

    def test_parts_with_others_between(self) -> None:
        """The last sum that takes a part has all of them; a part without elements goes."""
        build = Builder()
        q, k, v = build.input("q", (2, 4)), build.input("k", (2, 2)), build.input("v", (2, 2))
        none, z = build.input("none", (2, 0)), build.input("z", (2, 8))
        total = build.call(aten.add.Tensor, _slice(build, v, 6, 8, 1), z)
        for part in (_slice(build, none, 8, 8, 1), _slice(build, k, -4, -2, 1), _slice(build, q, 0, 4, 1)):
            total = build.call(aten.add.Tensor, total, part)
        graph = build.finish(("output", "0", total))
        self.assertExpectedInline(
            listing(JoinSlices().run(graph)),
            """\
q: [2, 4]
k: [2, 2]
v: [2, 2]
none: [2, 0]
z: [2, 8]
cat_default = cat([q, k, v], 1): [2, 8]
add_3 = add.Tensor(z, cat_default): [2, 8]
return [add_3]""",
        )

    def test_selected_places(self) -> None:
        """As ``qkv[0], qkv[1]`` have them: a dim of size one lies between."""
        build = Builder()
        x, y = build.input("x", (3,)), build.input("y", (3,))
        parts = [build.call(aten.select_backward.default, each, [2, 3], 0, at) for each, at in ((x, 0), (y, -1))]
        graph = build.finish(("output", "0", build.call(aten.add.Tensor, *parts)))
        self.assertExpectedInline(
            listing(JoinSlices().run(graph)),
            """\
x: [3]
y: [3]
unsqueeze_default = unsqueeze(x, 0): [1, 3]
unsqueeze_default_1 = unsqueeze(y, 0): [1, 3]
cat_default = cat([unsqueeze_default, unsqueeze_default_1], 0): [2, 3]
return [cat_default]""",
        )

    def test_features_of_a_product(self) -> None:
        """Slices of the product as it is viewed, each taken once or twice, become one split."""
        build = Builder()
        x, w = build.input("x", (6, 4)), build.input("w", (4, 8), "param")
        view = build.call(aten.view.default, build.call(aten.mm.default, x, w), [2, 3, 8])
        bounds = ((0, 4), (4, -2), (6, 2**63 - 1), (0, 4))
        parts = [build.call(aten.exp.default, build.call(aten.slice.Tensor, view, 2, *each)) for each in bounds]
        graph = build.finish(*(("output", str(place), part) for place, part in enumerate(parts)))
        self.assertExpectedInline(
            listing(JoinSlices().run(graph)),
            """\
x: [6, 4]
w: [4, 8]
mm = mm(x, w): [6, 8]
view = view(mm, [2, 3, 8]): [2, 3, 8]
split_with_sizes_default = split_with_sizes(view, [4, 2, 2], 2): [2, 3, 4], [2, 3, 2], [2, 3, 2]
getitem = getitem(split_with_sizes_default, 0): [2, 3, 4]
getitem_1 = getitem(split_with_sizes_default, 1): [2, 3, 2]
getitem_2 = getitem(split_with_sizes_default, 2): [2, 3, 2]
exp = exp(getitem): [2, 3, 4]
exp_1 = exp(getitem_1): [2, 3, 2]
exp_2 = exp(getitem_2): [2, 3, 2]
exp_3 = exp(getitem): [2, 3, 4]
return [exp, exp_1, exp_2, exp_3]""",
        )


def _sum_of(*bounds: tuple[int, ...]) -> fx.GraphModule:
    build = Builder()
    parts = []
    for place, (start, stop, *step) in enumerate(bounds):
        x = build.input(f"x{place}", (2, len(range(start, stop, *step))))
        parts.append(_slice(build, x, start, stop, *(step or [1])))
    return build.finish(("output", "0", build.call(aten.add.Tensor, *parts)))


@pytest.mark.parametrize(
    "bounds",
    [((0, 4), (4, 7)), ((0, 5), (4, 8)), ((0, 8, 2), (1, 8, 2)), ((1, 4), (4, 8))],
    ids=["a gap behind", "overlapping", "every other place", "a gap in front"],
)
def test_what_does_not_cover_is_left(bounds: tuple[tuple[int, ...], ...]) -> None:
    graph = _sum_of(*bounds)
    before = listing(graph)
    assert listing(JoinSlices().run(graph)) == before


def test_a_sum_of_nothing_is_one_of_its_terms() -> None:
    graph = JoinSlices().run(_sum_of((8, 8), (0, 0)))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [aten.slice_backward.default]


def test_terms_that_others_take_are_left() -> None:
    build = Builder()
    x, y = build.input("x", (2, 4)), build.input("y", (2, 4))
    first, second = _slice(build, x, 0, 4, 1), _slice(build, y, 4, 8, 1)
    total = build.call(aten.add.Tensor, first, second)
    graph = build.finish(("output", "0", total), ("output", "1", first))
    before = listing(graph)
    assert listing(JoinSlices().run(graph)) == before


class _Sliced(nn.Module):
    """Layers that take one product apart by slices, turn halves, and select from what is stacked."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.sizes = (16, 16 // groups, 16 // groups)
        self.fused = nn.ModuleList(nn.Linear(16, sum(self.sizes)) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fused, out in zip(self.fused, self.out, strict=True):
            made, (q_size, k_size, _) = fused(x), self.sizes
            q, k, v = made[..., :q_size], made[..., q_size : q_size + k_size], made[..., q_size + k_size :]
            q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
            q, k = (each * 2 + torch.cat((-each[..., 2:], each[..., :2], each[..., 4:]), -1) for each in (q, k))
            both = torch.stack((k, v)).repeat_interleave(q.shape[1] // k.shape[1], dim=2)
            heads = nn.functional.scaled_dot_product_attention(q, both[0], both[1], is_causal=True)
            x = x + out(heads.transpose(1, 2).flatten(2))
        return x.square().mean()


@pytest.mark.parametrize("role", ["zero", "tensor"])
def test_backward_takes_a_product_apart_again(role: str) -> None:
    """As the gradient of a gated linear unit is decomposed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.GLU(), nn.Linear(12, 4)).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    graph = captured(model, x)
    assert_exact(simulate(graph, model, x, (2,), uniform(graph, role), {}), one_device(model, x))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("role", ["data", "tensor", "tensor_sequence", "sequence"])
def test_exact(role: str, groups: int) -> None:
    torch.manual_seed(0)
    model, x = _Sliced(groups).double(), torch.randn(4, 8, 16, dtype=torch.float64)
    graph = captured(model, x)
    assert not [n for n in graph.graph.nodes if n.target in (aten.slice_backward.default, aten.select_backward.default)]
    assert_exact(simulate(graph, model, x, (2,), uniform(graph, role), {}), one_device(model, x))

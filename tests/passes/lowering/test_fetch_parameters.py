"""Parameters on the host come for each block that uses them, and their gradients go there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.fetch_parameters import FetchParameters
from passes.lowering.place_states import PlaceStates
from passes.lowering.split_forward_backward import SplitForwardBackward
from tests.graphs import Builder, listing
from tests.helpers import DEVICE, axes, captured, simulate, simulate_stages, uniform
from tests.models.zoo import Case, gpt2, llama
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

AHEAD = Cluster(DEVICE, axes((2, 2)), Overlap())
aten = torch.ops.aten
AWAY = Strategy(("data",), offload_states=True, offload_parameters=True)


def two_blocks() -> fx.GraphModule:
    """``sum(mm(mm(x, t(w)), w))``, the products in a block each, with the gradient of ``w``; ``w`` is returned, too."""
    build = Builder()
    w, x = build.input("w", (4, 4), "param"), build.input("x", (2, 4))
    t = build.call(aten.t.default, w)
    h = build.call(aten.mm.default, x, t)
    build.block = 1
    y = build.call(aten.mm.default, h, w)
    loss = build.call(aten.sum.default, y)
    tangent = build.begin_backward()
    dy = build.call(aten.expand.default, tangent, [2, 4])
    dw = build.call(aten.mm.default, build.call(aten.t.default, h), dy)
    dh = build.call(aten.mm.default, dy, t)
    build.block = 0
    dw = build.call(aten.add.Tensor, dw, build.call(aten.mm.default, build.call(aten.t.default, dh), x))
    return build.finish(("output", "0", loss), ("output", "1", w), ("grad", "w", dw), loss=0)


class TestGraph(expecttest.TestCase):
    def test_a_parameter_comes_for_each_block(self) -> None:
        graph = PlaceStates((AWAY, AWAY), {"w": 0}).run(two_blocks())
        halves = SplitForwardBackward().run(FetchParameters().run(graph))
        self.assertExpectedInline(
            listing(halves.forward),
            """\
w: [4, 4]
x: [2, 4]
from_host_1 = from_host(w, device=cpu): [4, 4]
arrived_1 = arrived(from_host_1, w): [4, 4]
t = t(arrived_1): [4, 4]
mm = mm(x, t): [2, 4]
from_host_2 = from_host(w, device=cpu): [4, 4]
arrived_2 = arrived(from_host_2, w): [4, 4]
mm_1 = mm(mm, arrived_2): [2, 4]
sum_1 = sum(mm_1): []
from_host_3 = from_host(w, device=cpu): [4, 4]
arrived_3 = arrived(from_host_3, w): [4, 4]
return [sum_1, arrived_3, mm, w, x]""",
        )
        self.assertExpectedInline(
            listing(halves.backward),
            """\
mm: [2, 4]
w: [4, 4]
x: [2, 4]
tangent: []
'expand = expand(tangent, [2, 4]): [2, 4]
't_1 = t(mm): [4, 2]
'mm_2 = mm(t_1, expand): [4, 4]
'from_host = from_host(w, device=cpu): [4, 4]
'arrived = arrived(from_host, w): [4, 4]
't_3 = t(arrived): [4, 4]
'mm_3 = mm(expand, t_3): [2, 4]
't_2 = t(mm_3): [4, 2]
'mm_4 = mm(t_2, x): [4, 4]
'add = add.Tensor(mm_2, mm_4): [4, 4]
'to_host = to_host(add): [4, 4]
'arrived_4 = arrived(to_host, add): [4, 4]
return [arrived_4]""",
        )

    def test_gradients_that_are_folded_stay(self) -> None:
        graph = PlaceStates((AWAY, AWAY), {"w": 0}).run(two_blocks())
        halves = SplitForwardBackward().run(FetchParameters(gradients_stay=True).run(graph))
        self.assertExpectedInline(listing(halves.backward).splitlines()[-1], """return [add]""")


def test_nothing_changes_of_parameters_on_the_device() -> None:
    graph = two_blocks()
    before = listing(graph)
    marked = PlaceStates((Strategy(("data",)), AWAY), {"w": 0}).run(graph)
    assert listing(FetchParameters().run(marked)) == before
    assert not any(port.on_host for port in signature(graph).inputs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("case", "roles", "options"),
    [
        (llama, ("zero", "data"), {}),
        (llama, ("zero", "tensor"), {"recompute": True, "gather_late": True}),
        (lambda: gpt2(2), ("zero", "zero"), {"split_gathers": 2}),
        (lambda: gpt2(2), ("tensor_sequence", "zero"), {"keep_gathered": True}),
    ],
)
def test_nothing_changes(case: Callable[[], Case], roles: tuple[str, ...], options: dict[str, Any]) -> None:
    """To the bit, on ranks whose shards are on the host; one block is on the device."""
    model, inputs = case()
    graph = captured(model, inputs)
    here = uniform(graph, *roles, **options)
    away = [replace(strategy, offload_states=i != 1, offload_parameters=i != 1) for i, strategy in enumerate(here)]
    results = [simulate(graph, model, inputs, (2, 2), each, {}, AHEAD) for each in (away, here)]
    assert all(results[0][name].equal(value) for name, value in results[1].items())


@pytest.mark.parametrize(("roles", "options", "schedule"), [
    (("pipeline", "zero"), {"keep_gathered": True}, "1f1b"),
    (("pipeline", "data"), {"recompute": True}, "zb_h1"),
])  # fmt: skip
def test_nothing_changes_of_stages(roles: tuple[str, ...], options: dict[str, Any], schedule: str) -> None:
    """Nor of sums over micro-batches, of a weight that both stages have; each has a block on the device."""
    model, inputs = gpt2(2)
    graph = captured(model, inputs)
    here = uniform(graph, *roles, **options)
    away = [
        replace(strategy, offload_states=i % 2 == 0, offload_parameters=i % 2 == 0) for i, strategy in enumerate(here)
    ]
    order = make_schedule(schedule, 2, 2, 2)
    there, expected = (simulate_stages(graph, model, inputs, (2, 2), each, [0, 2], order) for each in (away, here))
    assert all(there[name].equal(value) for name, value in expected.items())

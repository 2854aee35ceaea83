"""Saved values wait on the host: copies behind their operators and in front of their use, beside what is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import expecttest
import pytest
import torch
from torch import fx

from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.frontend.number_values import NumberValues
from passes.lowering.communication.overlap_host_copies import OverlapHostCopies
from passes.lowering.offload_activations import OffloadActivations
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import SplitForwardBackward
from tests.graphs import Builder, listing
from tests.helpers import captured, offloading, simulate, simulate_stages
from tests.models.mixtures import mixture
from tests.models.zoo import Case, gpt2, llama, tokens
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

aten = torch.ops.aten
KEEP = Strategy(("data",))
FIRST = replace(KEEP, offloads=(0,), num_values=1)
SECOND = replace(KEEP, offloads=(0, 1), num_values=2, offload_entering=True)


def two_blocks() -> fx.GraphModule:
    """``sum(tanh(relu(sin(exp(w)))))`` in two blocks, cut behind ``sin``, with the gradient of ``w``."""
    build = Builder()
    e = build.call(aten.exp.default, build.input("w", (4,), "param"))
    e = build.call(aten.mul.Tensor, e, build.input("x", (4,)))
    s = build.call(aten.sin.default, e)
    build.block = 1
    r = build.call(aten.relu.default, s)
    t = build.call(aten.tanh.default, r)
    loss = build.call(aten.sum.default, t)
    tangent = build.begin_backward()
    g = build.call(aten.tanh_backward.default, build.call(aten.expand.default, tangent, [4]), t)
    g = build.call(aten.mul.Tensor, g, build.call(aten.sign.default, build.call(aten.view.default, r, [4])))
    g = build.call(aten.mul.Tensor, g, s)
    build.block = 0
    g = build.call(aten.mul.Tensor, g, build.call(aten.cos.default, e))
    return build.finish(("output", "0", loss), ("grad", "w", g), loss=0)


def halves(*strategies: Strategy) -> tuple[fx.GraphModule, fx.GraphModule]:
    graph = Rematerialize(strategies).run(NumberValues().run(two_blocks()))
    split = SplitForwardBackward().run(OffloadActivations(strategies).run(graph))
    return split.forward, split.backward


class TestGraph(expecttest.TestCase):
    def test_a_value_goes_and_comes_back(self) -> None:
        forward, backward = halves(FIRST, KEEP)
        self.assertExpectedInline(
            listing(forward),
            """\
w: [4]
x: [4]
exp = exp(w): [4]
mul = mul.Tensor(exp, x): [4]
to_host = to_host(mul): [4]
arrived = arrived(to_host, mul): [4]
sin = sin(mul): [4]
relu = relu(sin): [4]
tanh = tanh(relu): [4]
sum_1 = sum(tanh): []
return [sum_1, tanh, relu, sin, arrived]""",
        )
        self.assertExpectedInline(
            listing(backward),
            """\
tanh: [4]
relu: [4]
sin: [4]
arrived: [4]
tangent: []
'expand = expand(tangent, [4]): [4]
'tanh_backward = tanh_backward(expand, tanh): [4]
'view = view(relu, [4]): [4]
'sign = sign(view): [4]
'mul_1 = mul.Tensor(tanh_backward, sign): [4]
'mul_2 = mul.Tensor(mul_1, sin): [4]
'from_host = from_host(arrived, device=cpu): [4]
'arrived_1 = arrived(from_host, arrived): [4]
'cos = cos(arrived_1): [4]
'mul_3 = mul.Tensor(mul_2, cos): [4]
return [mul_3]""",
        )

    def test_what_enters_a_recomputed_block(self) -> None:
        forward, backward = halves(KEEP, replace(KEEP, recompute=True, offload_entering=True))
        self.assertExpectedInline(
            listing(forward),
            """\
w: [4]
x: [4]
exp = exp(w): [4]
mul = mul.Tensor(exp, x): [4]
sin = sin(mul): [4]
to_host = to_host(sin): [4]
arrived = arrived(to_host, sin): [4]
relu = relu(sin): [4]
tanh = tanh(relu): [4]
sum_1 = sum(tanh): []
return [sum_1, arrived, mul]""",
        )
        self.assertExpectedInline(
            listing(backward),
            """\
arrived: [4]
mul: [4]
tangent: []
'expand = expand(tangent, [4]): [4]
'from_host = from_host(arrived, device=cpu): [4]
'arrived_1 = arrived(from_host, arrived): [4]
'relu_1 = relu(arrived_1): [4]
'tanh_1 = tanh(relu_1): [4]
'tanh_backward = tanh_backward(expand, tanh_1): [4]
'view = view(relu_1, [4]): [4]
'sign = sign(view): [4]
'mul_1 = mul.Tensor(tanh_backward, sign): [4]
'mul_2 = mul.Tensor(mul_1, arrived_1): [4]
'cos = cos(mul): [4]
'mul_3 = mul.Tensor(mul_2, cos): [4]
return [mul_3]""",
        )

    def test_copies_run_beside_computing(self) -> None:
        """As much is under way as the second block copies, which is two values."""
        forward, backward = (OverlapHostCopies().run(half) for half in halves(FIRST, SECOND))
        self.assertExpectedInline(
            listing(forward),
            """\
w: [4]
x: [4]
exp = exp(w): [4]
mul = mul.Tensor(exp, x): [4]
to_host_3 = to_host(mul): [4]
sin = sin(mul): [4]
to_host_2 = to_host(sin): [4]
relu = relu(sin): [4]
arrived_6 = arrived(to_host_3, mul): [4]
to_host_1 = to_host(relu): [4]
tanh = tanh(relu): [4]
arrived_4 = arrived(to_host_2, sin): [4]
to_host = to_host(tanh): [4]
sum_1 = sum(tanh): []
arrived_2 = arrived(to_host_1, relu): [4]
arrived = arrived(to_host, tanh): [4]
return [sum_1, arrived, arrived_2, arrived_4, arrived_6]""",
        )
        self.assertExpectedInline(
            listing(backward),
            """\
arrived: [4]
arrived_2: [4]
arrived_4: [4]
arrived_6: [4]
tangent: []
'from_host = from_host(arrived, device=cpu): [4]
'from_host_1 = from_host(arrived_2, device=cpu): [4]
'from_host_2 = from_host(arrived_4, device=cpu): [4]
'expand = expand(tangent, [4]): [4]
'arrived_1 = arrived(from_host, arrived): [4]
'tanh_backward = tanh_backward(expand, arrived_1): [4]
'arrived_3 = arrived(from_host_1, arrived_2): [4]
'view = view(arrived_3, [4]): [4]
'sign = sign(view): [4]
'mul_1 = mul.Tensor(tanh_backward, sign): [4]
'arrived_5 = arrived(from_host_2, arrived_4): [4]
'from_host_3 = from_host(arrived_6, device=cpu): [4]
'mul_2 = mul.Tensor(mul_1, arrived_5): [4]
'arrived_7 = arrived(from_host_3, arrived_6): [4]
'cos = cos(arrived_7): [4]
'mul_3 = mul.Tensor(mul_2, cos): [4]
return [mul_3]""",
        )


def mixtral() -> Case:
    return mixture("mixtral", num_hidden_layers=2), tokens()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "roles"),
    [(lambda: llama(2), ("zero", "tensor")), (lambda: llama(2), ("context", "data")), (mixtral, ("expert", "zero"))],
)
def test_nothing_changes(case: Callable[[], Case], roles: tuple[str, ...]) -> None:
    """To the bit, where all that is kept waits on the host."""
    model, inputs = case()
    graph = captured(model, inputs)
    plain = [Strategy(roles, recompute=i == 1) for i in range(num_blocks(graph))]
    there, here = (simulate(graph, model, inputs, (2, 2), each, {}) for each in (offloading(graph, plain), plain))
    assert all(there[name].equal(value) for name, value in here.items())


def test_nothing_changes_in_stages() -> None:
    model, inputs = gpt2(2)
    graph = captured(model, inputs)
    plain = [Strategy(("pipeline",), recompute=i == 1) for i in range(num_blocks(graph))]
    schedule = make_schedule("zb_h1", 2, 2, 2)
    there, here = (
        simulate_stages(graph, model, inputs, (2,), each, [0, 2], schedule)
        for each in (offloading(graph, plain), plain)
    )
    assert all(there[name].equal(value) for name, value in here.items())

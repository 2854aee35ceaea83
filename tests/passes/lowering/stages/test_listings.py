"""What the passes of stages and micro-batches make of one small model, before and after each."""

from __future__ import annotations

import expecttest
import torch
from torch import Tensor, fx, nn

from passes.analysis.blocks import num_blocks
from passes.lowering.stages.split_microbatches import SplitMicrobatches
from passes.lowering.stages.split_stages import SplitStages
from passes.lowering.stages.untie_weights import UntieWeights
from passes.sharding.shard_graph import ShardGraph
from tests.graphs import Builder, listing
from tests.helpers import DEVICE, axes, captured, uniform

aten = torch.ops.aten


class Line(nn.Module):
    """A loss that is a mean over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).square().mean()


def tied() -> fx.GraphModule:
    """``loss = sum(exp(x * w) * w)``: ``w`` is used in block 0 and in block 1."""
    build = Builder()
    x, w = build.input("x", (4, 8)), build.input("w", (4, 8), "param")
    inner = build.call(aten.exp.default, build.call(aten.mul.Tensor, x, w))
    build.block = 1
    loss = build.call(aten.sum.default, build.call(aten.mul.Tensor, inner, w))
    tangent = build.begin_backward()
    of_outer = build.call(aten.mul.Tensor, inner, tangent)
    of_inner = build.call(aten.mul.Tensor, w, tangent)
    build.block = 0
    through = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, of_inner, inner), x)
    whole = build.call(aten.add.Tensor, of_outer, through)
    return build.finish(("output", "0", loss), ("grad", "w", whole), loss=0)


class TestListings(expecttest.TestCase):
    def test_untie_weights(self) -> None:
        before = tied()
        self.assertExpectedInline(
            listing(before),
            """\
x: [4, 8]
w: [4, 8]
mul = mul.Tensor(x, w): [4, 8]
exp = exp(mul): [4, 8]
mul_1 = mul.Tensor(exp, w): [4, 8]
sum_1 = sum(mul_1): []
tangent: []
'mul_2 = mul.Tensor(exp, tangent): [4, 8]
'mul_3 = mul.Tensor(w, tangent): [4, 8]
'mul_4 = mul.Tensor(mul_3, exp): [4, 8]
'mul_5 = mul.Tensor(mul_4, x): [4, 8]
'add = add.Tensor(mul_2, mul_5): [4, 8]
return [sum_1, add]""",
        )
        self.assertExpectedInline(
            listing(UntieWeights((0, 1)).run(before)),
            """\
x: [4, 8]
w: [4, 8]
w_at_1: [4, 8]
mul = mul.Tensor(x, w): [4, 8]
exp = exp(mul): [4, 8]
mul_1 = mul.Tensor(exp, w_at_1): [4, 8]
sum_1 = sum(mul_1): []
tangent: []
'mul_2 = mul.Tensor(exp, tangent): [4, 8]
'mul_3 = mul.Tensor(w_at_1, tangent): [4, 8]
'mul_4 = mul.Tensor(mul_3, exp): [4, 8]
'mul_5 = mul.Tensor(mul_4, x): [4, 8]
return [sum_1, mul_5, mul_2]""",
        )

    def test_split_microbatches(self) -> None:
        before = captured(Line().double(), {"x": torch.ones(4, 3, dtype=torch.float64)})
        self.assertExpectedInline(
            listing(before),
            """\
primals_1: [2, 3]
primals_2: [4, 3]
tangents_1: []
t = t(primals_1): [3, 2]
mm = mm(primals_2, t): [4, 2]
pow_1 = pow.Tensor_Scalar(mm, 2): [4, 2]
mean = mean(pow_1): []
'expand = expand(tangents_1, [4, 2]): [4, 2]
'div = div.Scalar(expand, 8): [4, 2]
'pow_2 = pow.Tensor_Scalar(mm, 1.0): [4, 2]
'mul = mul.Scalar(pow_2, 2.0): [4, 2]
'mul_1 = mul.Tensor(div, mul): [4, 2]
't_1 = t(mul_1): [2, 4]
'mm_1 = mm(t_1, primals_2): [2, 3]
return [mean, mm_1, None]""",
        )
        split = SplitMicrobatches(2, DEVICE).run(before)
        self.assertExpectedInline(
            listing(split.graph),
            """\
primals_1: [2, 3]
primals_2: [4, 3]
hoisted_0: [2, 3]
tangents_1: []
t = t(primals_1): [3, 2]
mm = mm(hoisted_0, t): [2, 2]
pow_1 = pow.Tensor_Scalar(mm, 2): [2, 2]
mean = mean(pow_1): []
'expand = expand(tangents_1, [2, 2]): [2, 2]
'div = div.Scalar(expand, 8): [2, 2]
'pow_2 = pow.Tensor_Scalar(mm, 1.0): [2, 2]
'mul = mul.Scalar(pow_2, 2.0): [2, 2]
'mul_1 = mul.Tensor(div, mul): [2, 2]
't_1 = t(mul_1): [2, 2]
'mm_1 = mm(t_1, hoisted_0): [2, 3]
return [mean, mm_1, None]""",
        )
        self.assertExpectedInline(
            listing(split.prologue),
            """\
primals_2: [4, 3]
shard = shard(primals_2, 0, 1, 0): [2, 3]
return [shard]""",
        )

    def test_split_stages(self) -> None:
        untied = UntieWeights((0, 1)).run(tied())
        assert num_blocks(untied) == 2
        strategies = uniform(untied, "pipeline")
        sharded = ShardGraph(strategies, axes((2,)), DEVICE).run(untied)
        stages = SplitStages((0, 1), strategies).run(sharded)
        tasks = {f"stage {stage.index}, {name}": task for stage in stages for name, task in stage.tasks.items()}
        made = "\n\n".join(f"{name}:\n{listing(task.graph)}" for name, task in tasks.items() if not task.is_empty)
        self.assertExpectedInline(
            made,
            """\
stage 0, forward:
x: [4, 8]
w: [4, 8]
mul = mul.Tensor(x, w): [4, 8]
exp = exp(mul): [4, 8]
return [exp]

stage 0, backward:
mul_3: [4, 8]
exp: [4, 8]
x: [4, 8]
mul_5_so_far: [4, 8]
'mul_4 = mul.Tensor(mul_3, exp): [4, 8]
'mul_5 = mul.Tensor(mul_4, x): [4, 8]
'plus = plus(mul_5_so_far, mul_5): [4, 8]
return [plus]

stage 0, weight_grad:
mul_3: [4, 8]
exp: [4, 8]
x: [4, 8]
mul_5_so_far: [4, 8]
'mul_4 = mul.Tensor(mul_3, exp): [4, 8]
'mul_5 = mul.Tensor(mul_4, x): [4, 8]
'plus = plus(mul_5_so_far, mul_5): [4, 8]
return [plus]

stage 1, forward:
exp: [4, 8]
w_at_1: [4, 8]
mul_1 = mul.Tensor(exp, w_at_1): [4, 8]
sum_1 = sum(mul_1): []
return [sum_1]

stage 1, backward:
exp: [4, 8]
tangent: []
w_at_1: [4, 8]
mul_2_so_far: [4, 8]
'mul_2 = mul.Tensor(exp, tangent): [4, 8]
'plus = plus(mul_2_so_far, mul_2): [4, 8]
'mul_3 = mul.Tensor(w_at_1, tangent): [4, 8]
return [mul_3, plus]

stage 1, input_grad:
w_at_1: [4, 8]
tangent: []
'mul_3 = mul.Tensor(w_at_1, tangent): [4, 8]
return [mul_3]

stage 1, weight_grad:
exp: [4, 8]
tangent: []
mul_2_so_far: [4, 8]
'mul_2 = mul.Tensor(exp, tangent): [4, 8]
'plus = plus(mul_2_so_far, mul_2): [4, 8]
return [plus]""",
        )

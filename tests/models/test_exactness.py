"""Every plan trains as one device does: loss, gradients and updated parameters of whole models, on simulated ranks."""

from __future__ import annotations

import copy
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import fx, nn

from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from tests.helpers import assert_exact, captured, one_device, simulate
from tests.models.zoo import MODELS, tokens

Tables = list[tuple[str, ...]]
Setting = tuple[tuple[int, ...], Tables, dict[str, Any]]

NEIGHBOURS_4: Tables = [("zero", "tensor"), ("tensor", "data"), ("sequence", "zero")]
NEIGHBOURS_8: Tables = [
    ("zero", "sequence", "tensor"),
    ("data", "tensor", "tensor"),
    ("sequence", "zero", "data"),
    ("tensor_sequence", "data", "zero"),
]

SETTINGS: dict[str, Setting] = {
    # every role alone
    "2 data": ((2,), [("data",)], {}),
    "2 zero": ((2,), [("zero",)], {}),
    "2 zero, kept": ((2,), [("zero",)], {"keep_gathered": True}),
    "2 tensor, again": ((2,), [("tensor",)], {"recompute": True}),
    "2 tensor_sequence": ((2,), [("tensor_sequence",)], {}),
    "2 sequence": ((2,), [("sequence",)], {}),
    "3 data": ((3,), [("data",)], {}),
    "4 data, again": ((2, 2), [("data", "data")], {"recompute": True}),
    "4 zero": ((2, 2), [("zero", "zero")], {}),
    "4 tensor": ((2, 2), [("tensor", "tensor")], {}),
    "4 tensor_sequence, again": ((2, 2), [("tensor_sequence",) * 2], {"recompute": True}),
    "4 sequence": ((2, 2), [("sequence", "sequence")], {}),
    "8 data": ((2, 2, 2), [("data",) * 3], {}),
    "8 zero": ((2, 2, 2), [("zero",) * 3], {}),
    "8 tensor": ((2, 2, 2), [("tensor",) * 3], {}),
    "8 tensor_sequence": ((2, 2, 2), [("tensor_sequence",) * 3], {}),
    "8 sequence": ((2, 2, 2), [("sequence",) * 3], {}),
    # several roles in one block
    "4 data x tensor": ((2, 2), [("data", "tensor")], {}),
    "4 zero x tensor_sequence, again": ((2, 2), [("zero", "tensor_sequence")], {"recompute": True}),
    "4 sequence x zero, kept": ((2, 2), [("sequence", "zero")], {"keep_gathered": True}),
    "6 tensor x data": ((2, 3), [("tensor", "data")], {}),
    "8 zero x sequence x tensor": ((2, 2, 2), [("zero", "sequence", "tensor")], {}),
    "8 tensor_sequence x data x zero, again": ((2, 2, 2), [("tensor_sequence", "data", "zero")], {"recompute": True}),
    # neighbours with unlike strategies
    "4 neighbours": ((2, 2), NEIGHBOURS_4, {}),
    "4 neighbours, some again": ((2, 2), NEIGHBOURS_4, {"recompute": "alternate"}),
    "8 neighbours, some again": ((2, 2, 2), NEIGHBOURS_8, {"recompute": "alternate"}),
    "8 neighbours, kept": ((2, 2, 2), NEIGHBOURS_8, {"keep_gathered": True}),
}

# The solver takes seconds for each block of Swin, and its blocks are all unlike; ViT has the same head and T5's decoder
# the same blocks as its encoder and more.
FEW = ["2 data", "2 tensor, again", "4 zero", "4 neighbours, some again"]
SOME = [*FEW, "2 tensor_sequence", "4 sequence x zero, kept", "8 neighbours, kept", "8 zero x sequence x tensor"]
CHOSEN = {"gpt2": list(SETTINGS), "llama": SOME, "bert": SOME, "vit": SOME, "t5": SOME, "swin": FEW}


@cache
def prepared(name: str) -> tuple[nn.Module, dict[str, Any], fx.GraphModule, dict[str, torch.Tensor], dict[Any, Any]]:
    """A model, its inputs, its captured graph, what one device computes and solved blocks: made once a process."""
    model, inputs = MODELS[name](**({} if name == "swin" else {"layers": 2}))
    return model, inputs, captured(model, inputs), one_device(model, inputs), {}


def strategies(tables: Tables, options: dict[str, Any], count: int) -> list[Strategy]:
    """Deal the role tables to the blocks in turn."""
    recompute = options.get("recompute", False)
    return [
        Strategy(tables[i % len(tables)], recompute is True or (recompute == "alternate" and i % 2 == 0),
                 options.get("keep_gathered", False))
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "setting"), [(n, s) for n, settings in CHOSEN.items() for s in settings])
def test_loss_and_gradients(name: str, setting: str) -> None:
    model, inputs, graph, expected, solved = prepared(name)
    sizes, tables, options = SETTINGS[setting]
    plan = strategies(tables, options, num_blocks(graph))
    got = simulate(graph, model, inputs, sizes, plan, solved)
    assert_exact(got, expected, f"{name} on {prod(sizes)} ranks, {setting}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("setting", ["4 zero x tensor_sequence, again", "8 neighbours, some again"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parameters_after_three_steps(name: str, setting: str) -> None:
    """Three batches of unlike content: the errors of a plan would add up."""
    original, _, graph, _, solved = prepared(name)
    sizes, tables, options = SETTINGS[setting]
    plan = strategies(tables, options, num_blocks(graph))
    ours, theirs = copy.deepcopy(original), copy.deepcopy(original)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for step in range(3):
        inputs = tokens()
        inputs["input_ids"] = (inputs["input_ids"] + step) % 63 + 1
        expected = one_device(theirs, inputs)
        got = simulate(graph, ours, inputs, sizes, plan, solved)
        assert_exact(got, expected, f"{name}, {setting}, step {step}")
        for parameter_name, parameter in ours.named_parameters():
            parameter.grad = got[f"grad {parameter_name}"]
        for optimizer in optimizers:
            optimizer.step()
    start = dict(original.named_parameters())
    wanted = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, wanted[parameter_name], rtol=1e-8, atol=1e-10)
        assert not torch.equal(parameter, start[parameter_name]), f"{parameter_name} did not move"

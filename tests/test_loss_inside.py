"""A loss that a script computes, inside of the model or outside: what is refused (what is computed: rows_ranks.py)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import galvatron_fx
from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.own_outputs import own_outputs


def test_weights_and_names_stay_and_copies_have_their_own() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    inside = galvatron_fx.with_loss(nn.parallel.DataParallel(plain), nn.functional.mse_loss, targets="y")
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    loss, outputs = inside(x, y=y)
    assert isinstance(inside, nn.Sequential) and list(inside.state_dict()) == list(plain.state_dict())
    assert torch.equal(outputs, plain(x)) and torch.equal(loss, nn.functional.mse_loss(plain(x), y))
    other = copy.deepcopy(inside)
    nn.init.zeros_(other[0].weight)
    assert not torch.equal(other(x, y).loss, loss) and torch.equal(inside(x, y).loss, loss)


def test_refusals() -> None:
    with pytest.raises(InputError, match="loss is a float: give a function of outputs and targets"):
        galvatron_fx.with_loss(nn.Linear(2, 2), 0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the loss takes targets: pass them last, or as labels=\.\.\."):
        galvatron_fx.with_loss(nn.Linear(2, 2), nn.functional.mse_loss)(input=torch.zeros(1, 2))


def test_outputs_whose_rows_are_not_known() -> None:
    """The sequence is outermost, so a rank's rows lie apart."""

    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).transpose(0, 1).flatten(0, 1)

    known = signature(galvatron_fx.capture(Turned(3, 3), (torch.zeros(4, 5, 3),)))
    assert known.batch_dims == {"0": (0, 5)}
    for one in (known, replace(known, batch_dims=None)):
        with pytest.raises(
            InputError, match=r"not known which rows of output .* galvatron_fx.with_loss\(model, loss\)"
        ):
            own_outputs(torch.zeros(20, 3), one, Members.every())

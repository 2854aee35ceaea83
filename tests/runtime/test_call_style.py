"""Arguments by position and by name come to a program the way its example inputs came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from galvatron_fx.runtime.call_style import CallStyle
from passes.frontend.capture.flat_inputs import FlatInputs

X, Y = torch.ones(2), torch.zeros(2)


def forward(x: Tensor, y: Tensor | None = None, *rest: Tensor, scale: float = 1.0) -> Tensor:
    raise AssertionError("it is not called")


@pytest.mark.parametrize("example", [(X, Y), {"x": X, "y": Y}])
def test_both_ways_are_one(example: Any) -> None:
    style = CallStyle(forward, FlatInputs.of(example))
    expected = ((X, Y), {}) if isinstance(example, tuple) else ((), {"x": X, "y": Y})
    for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X})):
        assert style.of(args, kwargs) == expected
    assert style.of((X,), {"scale": 2.0}) == (((X,), {"scale": 2.0}) if expected[0] else ((), {"x": X, "scale": 2.0}))


@pytest.mark.parametrize("args, kwargs", [((X, Y, X), {}), ((X,), {"x": X})], ids=["more", "twice"])
def test_what_is_no_other_way_to_say_it_stays(args: Any, kwargs: Any) -> None:
    assert CallStyle(forward, FlatInputs.of((X,))).of(args, kwargs) == (args, kwargs)

"""Kernels give the same however their arguments lie, as graphs keep no layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from galvatron_fx.ir.kernels.select import Kernels
from passes.sharding.local_args import DENSE_ARGUMENTS
from tests.passes.sharding.rule_calls import CALLS, TORCH_CALLS, WITHOUT_VALUES, Call, In, aten

VALUED = [call for call in (*CALLS, *TORCH_CALLS) if call[0] not in WITHOUT_VALUES]
REFUSES = aten._grouped_mm.default  # says so, where no dim lies in order


def by_columns(x: Tensor) -> Tensor:
    dims = [*range(x.dim())][::-1]
    return x.permute(dims).contiguous().permute(dims)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).select(-1, 0)


def outputs(target: Any, leaves: list[Any], spec: Any) -> list[Tensor]:
    args, kwargs = tree_unflatten(leaves, spec)
    args = [x.contiguous() if i in DENSE_ARGUMENTS.get(target, ()) and x is not None else x for i, x in enumerate(args)]
    if target in (aten.view.default, aten._unsafe_view.default):
        target = aten.reshape.default  # as code is generated
    result = Kernels().of(target, (), kwargs)(*args, **kwargs)
    return [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]


@pytest.mark.parametrize("call", VALUED, ids=lambda call: call[0].__name__)
def test_a_kernel_reads_tensors_that_lie_in_any_way(call: Call) -> None:
    target, args, kwargs = call
    leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, In))
    dense = [leaf.value if isinstance(leaf, In) else leaf for leaf in leaves]
    wanted = outputs(target, dense, spec)
    for position, leaf in enumerate(leaves):
        for layout in (by_columns, with_gaps) if isinstance(leaf, In) else ():
            given = [layout(x) if i == position else x for i, x in enumerate(dense)]
            try:
                got = outputs(target, given, spec)
            except RuntimeError:
                assert target is REFUSES
                continue
            torch.testing.assert_close(got, wanted, msg=lambda text, at=position: f"argument {at}: {text}")

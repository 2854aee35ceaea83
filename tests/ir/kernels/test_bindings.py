"""Functions of torch reach the operators that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_fx.ir.kernels.bindings import BINDINGS, with_fast_calls

aten = torch.ops.aten
X, POSITIVE, BATCH = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5 for shape in (
    (3, 3), (3, 3), (2, 3, 3),
))  # fmt: skip
IS_LARGE = X > 1
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.addmm.default: (X[0], X, X),
    aten.baddbmm.default: (BATCH, BATCH, BATCH),
    aten.bmm.default: (BATCH, BATCH),
    aten.cat.default: ([X, X], 1),
    aten.embedding.default: (X, torch.tensor([[0, 2]]), -1, False, False),
    aten.expand.default: (X, [4, 3, 3]),
    aten.gather.default: (X, 1, torch.tensor([[0, 2]])),
    aten.logical_and.default: (IS_LARGE, IS_LARGE),
    aten.logical_or.default: (IS_LARGE, IS_LARGE),
    aten.maximum.default: (X, POSITIVE),
    aten.mean.dim: (BATCH, [1, 2], True),
    aten.minimum.default: (X, POSITIVE),
    aten.mm.default: (X, X),
    aten.native_layer_norm.default: (X, [3], X[0], X[1], 1e-5),
    aten.permute.default: (BATCH, [2, 0, 1]),
    aten.pow.Tensor_Scalar: (X, 3),
    aten.pow.Tensor_Tensor: (X, X),
    aten.reshape.default: (BATCH.transpose(0, 1), [3, -1]),
    aten.select.int: (BATCH, 1, 2),
    aten.split_with_sizes.default: (X, [1, 2], 1),
    aten.squeeze.dim: (X[:1], 0),
    aten.squeeze.dims: (X[:1], [0]),
    aten.sum.dim_IntList: (BATCH, [0, 2], True),
    aten.transpose.int: (BATCH, -1, 0),
    aten.unsqueeze.default: (X, -1),
    aten.view.default: (BATCH, [3, 6]),
    aten.where.self: (IS_LARGE, X, -X),
}


class Calls(TorchDispatchMode):
    """Operators that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".Scalar"))
        return func(*args, **(kwargs or {}))


def arguments_of(overload: Any) -> tuple[Any, ...]:
    if overload in ARGUMENTS:
        return ARGUMENTS[overload]
    return {"Tensor": (X, POSITIVE), "Scalar": (X, 1.5)}.get(overload._overloadname, (X,))


@pytest.mark.parametrize("overload", BINDINGS, ids=str)
def test_a_function_reaches_the_operator(overload: Any) -> None:
    """A number beside a tensor may become a tensor before."""
    arguments, calls = arguments_of(overload), []
    for function in (overload, BINDINGS[overload]):
        with Calls() as mode:
            result = function(*arguments)
        calls.append([name.removesuffix(".Tensor") for name in mode.names])
        results = result if isinstance(result, (tuple, list)) else [result]
        expected = overload(*arguments)
        for one, other in zip(results, expected if isinstance(expected, (tuple, list)) else [expected], strict=True):
            assert one.equal(other) and one.dtype == other.dtype and one.stride() == other.stride()
    assert calls[0] == calls[1]


def test_keywords_and_dtypes_are_kept() -> None:
    numbers = torch.arange(3)
    assert BINDINGS[aten.add.Tensor](X, X, alpha=-2).equal(aten.add.Tensor(X, X, alpha=-2))
    assert BINDINGS[aten.sum.dim_IntList](X, [0], dtype=torch.float64).equal(X.double().sum(0))
    for overload in (aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.gt.Scalar):
        for value in (2, 2.5, True):
            one, other = BINDINGS[overload](numbers, value), overload(numbers, value)
            assert one.equal(other) and one.dtype == other.dtype


def test_calls_with_other_arguments_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    graph.output((product, graph.call_function(aten.neg.default, (), {"self": x})))
    module = fx.GraphModule({}, graph)
    fast = with_fast_calls(module)
    targets = [[node.target for node in g.graph.nodes if node.op == "call_function"] for g in (module, fast)]
    assert targets == [[aten.mm.default, aten.neg.default], [torch.mm, aten.neg.default]]
    assert all(one.equal(other) for one, other in zip(fast(X), module(X), strict=True))

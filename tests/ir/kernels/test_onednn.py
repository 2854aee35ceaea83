"""Products of float32 by oneDNN are those of torch, and only large enough ones go there."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch import Tensor

from galvatron_fx.errors import InputError
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.kernels.onednn import has_onednn, on_onednn
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.ir.torch_compat.graphs import compile_functional
from galvatron_fx.profiling import kernel_choice
from galvatron_fx.profiling.kernel_choice import fastest_kernels
from passes.lowering.codegen import Codegen
from tests.graphs import Builder, listing
from tests.profiling.test_measure import alone

aten = torch.ops.aten
ops = torch.ops.galvatron_fx

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


LAYOUTS = {
    "rows": lambda m, n: numbers(m, n),
    "columns": lambda m, n: numbers(n, m).t(),
    "part of a wider one": lambda m, n: numbers(m, 2 * n + 1)[:, 1 : n + 1],
    "every other row": lambda m, n: numbers(2 * m, n)[::2],
    "one row for all": lambda m, n: numbers(1, n).expand(m, n),
    "one column for all": lambda m, n: numbers(m, 1).expand(m, n),
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (1, 1, 1), (33, 129, 65), (0, 4, 3)])
def test_products_of_all_layouts(left: str, right: str, m: int, k: int, n: int) -> None:
    a, b, bias = LAYOUTS[left](m, k), LAYOUTS[right](k, n), numbers(n)
    torch.testing.assert_close(ops.onednn_mm(a, b), a @ b)
    torch.testing.assert_close(ops.onednn_addmm(bias, a, b), bias + a @ b)
    assert ops.onednn_mm(a, b).is_contiguous()


def test_what_gains_goes_to_onednn() -> None:
    large = [spec(128, 128), spec(128, 64)]
    assert on_onednn(aten.mm.default, large) is ops.onednn_mm.default
    assert on_onednn(aten.addmm.default, [spec(64), *large]) is ops.onednn_addmm.default


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        (aten.mm.default, [spec(64, 64), spec(64, 64)]),
        (aten.mm.default, [spec(512, 512, dtype=torch.float64), spec(512, 512, dtype=torch.float64)]),
        (aten.mm.default, [None, spec(512, 512)]),
        (aten.addmm.default, [spec(512, 512), spec(512, 512), spec(512, 512)]),
        (aten.bmm.default, [spec(8, 512, 512), spec(8, 512, 512)]),
        (aten.add.Tensor, [spec(512, 512), spec(512, 512)]),
    ],
)
def test_all_else_stays(target, inputs) -> None:
    assert on_onednn(target, inputs) is target
    assert Kernels(onednn=True).of(target, inputs, {}) is target


def test_scaled_sums_and_other_machines_keep_torchs_own() -> None:
    inputs = [spec(64), spec(128, 128), spec(128, 64)]
    assert Kernels(onednn=True).of(aten.addmm.default, inputs, {"beta": 2}) is aten.addmm.default
    for kernels in (Kernels(), Kernels("cuda", onednn=True)):
        assert kernels.of(aten.addmm.default, inputs, {}) is aten.addmm.default


class TestGraphs(TestCase):
    def test_bound_graphs_name_what_runs(self) -> None:
        build = Builder()
        x, w = (build.input(name, (rows, 256), dtype=torch.float32) for name, rows in (("x", 128), ("w", 64)))
        product = build.call(aten.mm.default, x, build.call(aten.t.default, w))
        small = build.call(aten.mm.default, product, build.call(aten.t.default, product))
        graph = Codegen((), Kernels(onednn=True)).run(build.finish(("output", "0", small)))
        self.assertExpectedInline(
            listing(graph),
            """\
x: [128, 256]
w: [64, 256]
t = t(w): [256, 64]
mm = onednn_mm(x, t): [128, 64]
t_1 = t(mm): [64, 128]
mm_1 = onednn_mm(mm, t_1): [128, 128]
return [mm_1]""",
        )


@pytest.mark.slow
def test_inductor_calls_it_on_views() -> None:
    def gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        return ops.onednn_mm(dy * 2, w), ops.onednn_mm(dy.t(), x)

    arguments = [numbers(128, 64), numbers(96, 64), numbers(128, 96)]
    made = compile_functional(gradients, arguments)(list(arguments))
    for got, expected in zip(made, gradients(*arguments), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_faster_library_is_measured_once() -> None:
    first = fastest_kernels(alone())
    assert first.device_type == "cpu" and fastest_kernels(alone()) == first


def test_torch_s_own_kernels_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_onednn_is_faster", lambda num_threads: True)
    assert fastest_kernels(alone()).onednn and not fastest_kernels(alone(), "torch").onednn
    monkeypatch.setenv("GALVATRON_FX_KERNELS", "torch")
    assert not fastest_kernels(alone()).onednn and fastest_kernels(alone(), "auto").onednn
    with pytest.raises(InputError, match="kernels is 'mkl': use one of 'auto', 'torch'"):
        fastest_kernels(alone(), "mkl")
    monkeypatch.setenv("GALVATRON_FX_KERNELS", "onednn")
    with pytest.raises(InputError, match="GALVATRON_FX_KERNELS is 'onednn': use one of"):
        fastest_kernels(alone())

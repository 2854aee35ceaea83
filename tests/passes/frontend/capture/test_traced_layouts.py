"""Calls whose meaning is how a tensor lies: exact however it lay in the trace and lies on a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import FileCheck

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError
from passes.frontend.capture.capture import Capture
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture of this file)

N = 4
Code = Callable[[Tensor, Tensor], Tensor]


class Factors(nn.Module):
    """A loss of a parameter that lies by columns [N, N], and of a matrix for each row of x [batch, N, N]."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(N, N * N, dtype=torch.float64)
        self.by_columns = nn.Parameter(torch.linalg.qr(torch.randn(N, N, dtype=torch.float64))[0])
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.by_columns, self.linear(x).view(-1, N, N) + 3 * torch.eye(N, dtype=x.dtype))


def determinants(w: Tensor, batched: Tensor) -> Tensor:
    of_parameter = torch.det(w) * torch.det(w.t().contiguous()) * torch.linalg.slogdet(w)[1]
    return of_parameter + torch.logdet(batched.mT).mean() + torch.det(batched.mT.contiguous()).sin().mean()


def solutions(w: Tensor, batched: Tensor) -> Tensor:
    vectors = torch.linalg.solve(batched.mT, batched[..., 0]).square().mean() + torch.linalg.solve(w, w[0]).sin().sum()
    right = torch.linalg.solve(w, batched, left=False).square().mean()
    return vectors + right + torch.linalg.solve(batched, w).square().mean()


def complex_pairs(w: Tensor, batched: Tensor) -> Tensor:
    pairs = torch.complex(batched, batched.mT)
    return torch.linalg.slogdet(pairs.mT)[1].mean() + torch.linalg.solve(pairs.mT, pairs).abs().mean() + w.sum()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("code", [determinants, solutions, complex_pairs])
@pytest.mark.parametrize("role", ["zero", "data", "tensor"])
def test_exact_for_matrices_by_rows_and_by_columns(code: Code, role: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, N, dtype=torch.float64)
    report = galvatron_fx.check(Factors(code), (2,), (x,), Plan.uniform((2,), (role,)))
    assert report.ok, report


def test_a_matrix_by_columns_is_factored_as_its_transpose_is_by_rows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_rows = nn.Parameter(torch.eye(N))
            self.by_columns = nn.Parameter(torch.ones(N, N).tril().t())

        def forward(self, x: Tensor) -> Tensor:
            return torch.det(self.by_rows) + torch.det(self.by_columns) + torch.linalg.solve(self.by_columns, x).sum()

    graph = Capture(forward_only=True).run(Model(), (torch.ones(N, 2),)).graph
    determinants, solution = str(graph).split("linalg_lu_factor_ex.default]")
    FileCheck().check_count("aten._linalg_det", 2, exactly=True).run(determinants)
    FileCheck().check_count("aten.transpose.int](args = (%arg2_1, -2, -1)", 1, exactly=True).run(determinants)
    FileCheck().check("aten.linalg_lu_solve").check_not("aten._linalg_solve_ex").run(solution)


def overlapping(h: Tensor) -> Tensor:
    """Windows of four steps of h [batch, time, width], which lies by time [batch, windows, 4, width]."""
    h = h.transpose(0, 1)
    step, batch, width = h.stride()
    return h.as_strided((h.shape[1], h.shape[0] // 2 - 1, 4, h.shape[2]), (batch, 2 * step, step, width))


def copied(h: Tensor) -> Tensor:
    """Every other step of h, from a transposed copy [batch, width, time / 2]."""
    h = h.transpose(1, 2).contiguous()
    return h.as_strided((*h.shape[:2], h.shape[2] // 2), (*h.stride()[:2], 2))


def written(h: Tensor) -> Tensor:
    """h by itself transposed [batch, time, time], with its diagonal squared."""
    scores = h @ h.mT
    batch, row, column = scores.stride()
    diagonal = scores.as_strided(scores.shape[:2], (batch, row + column)).square()
    return torch.as_strided_scatter(scores, diagonal, scores.shape[:2], (batch, row + column))


class Windows(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(N, N, dtype=torch.float64), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x)).sin().mean()


@pytest.mark.parametrize("code", [overlapping, copied, written])
@pytest.mark.parametrize("role", ["zero", "data", "tensor", "sequence"])
def test_windows_show_what_they_showed_in_the_trace(code: Callable[[Tensor], Tensor], role: str) -> None:
    x = torch.randn(4, 8, N, dtype=torch.float64)
    report = galvatron_fx.check(Windows(code), (2,), (x,), Plan.uniform((2,), (role,)))
    assert report.ok, report


def test_a_window_onto_other_memory_is_refused() -> None:
    model = Windows(lambda h: h[:, 2:].as_strided((h.shape[0], 4), (h.stride(0), 1), 0))
    with pytest.raises(CaptureError, match=r"as_strided.*shows memory that is not of its tensor alone.*unfold"):
        Capture().run(model, (torch.randn(4, 8, N, dtype=torch.float64),))

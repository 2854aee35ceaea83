"""What is followed diagonal by diagonal equals what torch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph.metadata import output_ports
from passes.analysis.diagonal_values import Diagonals, diagonals
from passes.frontend.capture.capture import Capture

Mask = Callable[[], Tensor]


class Returning(nn.Module):
    """Returns a constant beside a loss."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.sum(), "mask": self.mask() + 0 if self.mask().dtype != torch.bool else self.mask() | False}


def followed(mask: Mask) -> Diagonals | None:
    graph = Capture(symbolic=False).run(Returning(mask), (torch.ones(2, 3),))
    return diagonals(output(graph, 1), {})


def output(graph: fx.GraphModule, position: int) -> fx.Node:
    nodes = [node for port, node in output_ports(graph) if port.kind == "output"]
    node = nodes[position]
    assert node is not None
    return node


def whole(known: Diagonals) -> Tensor:
    """All elements."""
    if known.rows is None:
        return known.values.expand(known.shape)
    index = steps(known.shape, known.rows)
    if known.columns is not None:
        index = index - steps(known.shape, known.columns) + known.shape[known.columns] - 1
    return known.values[index].expand(known.shape)


def steps(shape: tuple[int, ...], dim: int) -> Tensor:
    """The index along a dim, of size 1 in all others."""
    return torch.arange(shape[dim]).reshape([-1 if other == dim else 1 for other in range(len(shape))])


def causal(rows: int, columns: int, first: int = 0) -> Tensor:
    return torch.arange(columns)[None] <= first + torch.arange(rows)[:, None]


def packed(positions: Tensor) -> Tensor:
    """As transformers looks for documents in one row: where positions do not go on by one, another begins."""
    before = torch.cat([positions[:, :1] - 1, positions], -1)
    document = (before.diff() != 1).cumsum(-1)
    batch, rows, columns = torch.arange(2)[:, None, None], torch.arange(6)[:, None], torch.arange(6)
    return (document[batch, rows] == document[batch, columns]) & (columns <= rows)


MASKS: dict[str, Mask] = {
    "comparison": lambda: causal(5, 7, 2),
    "window": lambda: causal(6, 6) & (torch.arange(6)[:, None] - torch.arange(6) < 3),
    "distance": lambda: (torch.arange(4)[:, None] - torch.arange(6)[None]).abs(),
    "tril of ones": lambda: torch.ones(5, 5, dtype=torch.bool).tril(),
    "triu of a number": lambda: torch.full((2, 1, 4, 6), -1e9).triu(1),
    "tril twice": lambda: torch.ones(6, 6).tril(2).triu(-1),
    "where": lambda: torch.where(causal(4, 4), 0.0, float("-inf")),
    "of a dtype": lambda: (1 - causal(4, 4).to(torch.bfloat16)) * torch.finfo(torch.bfloat16).min,
    "transposed": lambda: causal(4, 6).T,
    "permuted": lambda: causal(4, 6).expand(2, 3, 4, 6).permute(2, 0, 3, 1),
    "rows cut": lambda: causal(8, 6)[2:7],
    "columns cut": lambda: causal(8, 6)[:, 1:-2],
    "cut twice": lambda: causal(8, 8)[3:, 2:],
    "one column": lambda: causal(6, 6)[:, 2:3],
    "one column repeated": lambda: causal(6, 6)[:, 2:3].expand(6, 6),
    "one column beside all": lambda: causal(6, 6)[:, 2:3] & torch.ones(6, 6, dtype=torch.bool),
    "one row of a triangle, repeated": lambda: torch.ones(1, 5).tril(2).expand(5, 5),
    "one column of a triangle, repeated": lambda: torch.ones(5, 1).triu(-2).expand(5, 5),
    "one operand twice": lambda: (lambda mask: torch.where(mask > 0, mask, mask * mask))(causal(4, 4).float()),
    "signs of zero": lambda: 1 / torch.where(causal(4, 4), 0.0, -0.0),
    "viewed": lambda: causal(4, 6).view(1, 4, 1, 6).squeeze(0).squeeze(-2)[None, None],
    "filled": lambda: torch.zeros(4, 4).masked_fill(~causal(4, 4), float("-inf")),
    "steps of two": lambda: torch.arange(0, 12, 2)[:, None] >= torch.arange(1, 9, 2),
    "one dim": lambda: torch.arange(5) * 2 - 3,
    "no dim": lambda: torch.tensor(3.0).double() + torch.ones(4, 4),
    "of packed positions": lambda: packed(torch.arange(6).expand(2, 6)),
    "put together": lambda: torch.cat([torch.full((2, 1), -1), torch.arange(5).expand(2, 5)], -1),
    "counted": lambda: torch.ones(2, 5, dtype=torch.bool).cumsum(-1)[:, None, :, None] >= torch.arange(1, 6),
    "indexed": lambda: (torch.arange(6).expand(2, 6) + 0)[torch.arange(2)[:, None, None], torch.arange(3)[:, None] * 2],
    "of many dims": lambda: causal(3, 4)[None, None].expand(2, 2, 3, 4).float().clone(),
}
OTHERS: dict[str, Mask] = {
    "unlike steps": lambda: torch.arange(0, 12, 2)[:, None] >= torch.arange(6),
    "a sum": lambda: torch.arange(4)[:, None] + torch.arange(4),
    "a product": lambda: torch.arange(4)[:, None] * torch.arange(4),
    "squares": lambda: torch.arange(4)[:, None] ** 2 >= torch.arange(4) ** 2,
    "parities": lambda: (torch.arange(4) % 2 == 0)[:, None] <= (torch.arange(6) % 2 == 0),
    "blocks": lambda: (torch.arange(6) // 2)[:, None] >= torch.arange(6) // 2,
    "a window that depends on the row": lambda: causal(4, 4) & (torch.arange(4) > 1),
    "mixed": lambda: causal(4, 4) & causal(4, 4).T,
    "one column and all": lambda: causal(6, 6)[:, 2:3] & causal(6, 6),
    "one row and all": lambda: causal(6, 6)[2:3] & causal(6, 6),
    "reshaped": lambda: causal(4, 6).reshape(6, 4),
    "every second": lambda: causal(8, 8)[::2],
    "summed": lambda: causal(4, 4).cumsum(0),
    "put together across": lambda: torch.cat([torch.arange(4)[None], torch.ones(1, 4, dtype=torch.int64)], 0),
    "indexed by both": lambda: (torch.arange(6).expand(2, 6) + 0)[
        torch.arange(2)[:, None], torch.tensor([[0, 1], [2, 3]])
    ],
    "flipped": lambda: causal(4, 4).flip(0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MASKS)
def test_what_is_followed_is_what_torch_computes(name: str) -> None:
    known, expected = followed(MASKS[name]), MASKS[name]()
    assert known is not None
    assert len(known.values) <= sum(expected.shape)
    torch.testing.assert_close(whole(known), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_what_depends_on_more_is_not(name: str) -> None:
    known = followed(OTHERS[name])
    assert known is None or torch.equal(whole(known), OTHERS[name]())


def test_what_depends_on_an_input_is_not() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": x.sum(), "mask": x > 0}

    graph = Capture(symbolic=False).run(Reading(), (torch.ones(2, 3),))
    assert diagonals(output(graph, 1), {}) is None


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda mask: ~mask,
    lambda mask: mask.mT,
    lambda mask: mask.tril(1),
    lambda mask: mask.triu(-1),
    lambda mask: mask[..., 1:, :],
    lambda mask: mask[..., :-1],
    lambda mask: mask[..., :1] | mask,
    lambda mask: mask[..., :1, :],
    lambda mask: mask[..., :1].expand_as(mask),
    lambda mask: mask[None],
    lambda mask: mask.expand(2, *mask.shape),
    lambda mask: mask | (torch.arange(mask.shape[-1]) == torch.arange(mask.shape[-2])[:, None]),
    lambda mask: mask & torch.ones(mask.shape[-2:], dtype=torch.bool).tril(),
]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(2, 6), st.integers(-2, 2), st.lists(st.sampled_from(CHANGES), max_size=5))
def test_any_mask_of_these_changes(
    rows: int, columns: int, first: int, changes: list[Callable[[Tensor], Tensor]]
) -> None:
    def mask() -> Tensor:
        value = causal(rows, columns, first)
        for change in changes:
            value = change(value)
        return value

    known = followed(mask)
    assert known is None or torch.equal(whole(known), mask())

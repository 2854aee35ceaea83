"""Elements written to the places of a mask, and checks of values: exact on any mesh, and nan where one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.frontend.capture.capture import Capture
from passes.frontend.masked_scatter import dense_scatters
from passes.frontend.pipeline import Frontend
from tests.helpers import assert_exact, one_device, simulate, uniform
from tests.models import zoo

IMAGE = 5  # the token that stands for a part of an image


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "input, mask, source",
    [
        (values(4, 6, 3), values(4, 6, 1) > 0, values(40, 3)),  # whole rows, of more than are wanted
        (values(4, 6, 3), (values(4, 6, 1) > 0).expand(4, 6, 3), values(5, 8, 3)),
        (values(4, 6, 3), values(4, 6, 3) > 0, values(72)),
        (values(6, 3), values(4, 6, 3) > 0, values(73)),
        (values(5), values(5) > 9, values(1)),
        (values(5), values(5) > 0, values(7)),
        (values(4, 6).mul(9).long(), values(4, 6) > 0, torch.arange(24)),
    ],
)
def test_scatters_are_those_of_torch(input: Tensor, mask: Tensor, source: Tensor) -> None:
    floats = [tensor for tensor in (input, source) if tensor.is_floating_point()]
    leaves = [tensor.clone().requires_grad_() for tensor in floats] or [input, source]

    def made(function: Any) -> list[Tensor]:
        result = function(leaves[0], mask, leaves[1])
        return [result, *(torch.autograd.grad(result.sin().sum(), leaves) if floats else ())]

    expected = made(torch.masked_scatter)
    with dense_scatters():
        got = made(lambda input, mask, source: input.masked_scatter(mask, source))
        expanded = input.expand(torch.broadcast_shapes(input.shape, mask.shape)).clone()
        expanded.masked_scatter_(mask, source)
    for mine, torchs in zip(got, expected, strict=True):
        assert torch.equal(mine, torchs)
    assert torch.equal(expanded, expected[0])


def test_what_a_source_lacks_is_nan() -> None:
    with dense_scatters():
        made = torch.masked_scatter(torch.zeros(2, 3, 2), torch.ones(2, 3, 1, dtype=torch.bool), torch.ones(4, 2))
    assert made.isnan().sum() == 4 and made.nansum() == 8


class SeesAndReads(nn.Module):
    """A language model whose image tokens are parts of images, as LLaVA has them: image by image, and checked."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sees = nn.Embedding(16, 8), nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        """``ids``: [batch, sequence]; ``image``: [batch, parts, 6]."""
        parts = torch.cat(list(self.sees(image)), 0)
        mask = (ids == IMAGE).unsqueeze(-1)
        torch._check_tensor_all(mask.sum() * 8 == parts.numel())
        x = self.words(ids).masked_scatter(mask, parts)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean(), "x": x}


def batch() -> dict[str, Tensor]:
    """Images of three parts, in other places of each sample, and not three in each."""
    ids = torch.randint(6, 16, (4, 8), generator=torch.Generator().manual_seed(1))
    ids.view(-1)[[1, 2, 3, 6, 9, 14, 16, 20, 21, 25, 26, 27]] = IMAGE
    return {"ids": ids, "image": values(4, 3, 6)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("roles", [("data", "data"), ("data", "tensor"), ("zero", "sequence")])
def test_images_among_words_are_exact(roles: tuple[str, ...]) -> None:
    model = zoo.build(SeesAndReads)
    graph = Frontend().run(model, batch())
    assert_exact(simulate(graph, model, batch(), (2, 2), uniform(graph, *roles), {}), one_device(model, batch()))


def test_a_list_of_samples_is_the_batch() -> None:
    """Else there would be a program for each batch size."""
    graph = Capture().run(zoo.build(SeesAndReads), batch())
    assert graph.meta["symbols"] is not None
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.unbind.int)


def test_a_failed_check_is_told_by_nan() -> None:
    model, inputs = zoo.build(SeesAndReads), batch()
    graph = Frontend().run(model, inputs)
    inputs["ids"][0, 1] = 7  # one part of an image less
    with pytest.raises(RuntimeError):
        model(**inputs)
    got = simulate(graph, model, inputs, (2,), uniform(graph, "data"), {})
    assert got["output 0"].isnan() and got["output 1"].isnan().all()

"""Sizes of images, as values of an input: Python numbers of the program, which is for them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, GalvatronError, InputError
from galvatron_fx.ir.graph.decisions import Computation, Decision, Given, Step
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.runtime.decided_inputs import require_whole
from passes.frontend.capture import capture
from passes.frontend.capture.flat_inputs import FlatInputs
from tests.ir.cluster.test_cluster import described

WIDTH = 8


class Images(nn.Module):
    """Patches of all images in one run, of each as many as its sizes say, and words that attend to their image."""

    def __init__(self, read: Callable[[Tensor], list[int]]) -> None:
        super().__init__()
        self.read = read
        self.patch, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(16, WIDTH)

    def forward(self, words: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        lengths = self.read(sizes)
        places = torch.cat([torch.arange(length) for length in lengths])
        of_image = torch.arange(len(lengths)).repeat_interleave(sizes.prod(1))
        h = self.patch(patches) + self.places(places)
        h = h + self.places(of_image)
        images = torch.stack([part.tanh().mean(0) for part in h.split(lengths)])
        return self.out(words + images[:, None]).square().mean()


READS: dict[str, Callable[[Tensor], list[int]]] = {
    "list": lambda sizes: sizes.prod(-1).tolist(),
    "rows": lambda sizes: [int(height) * int(width) for height, width in sizes],
    "none": lambda sizes: [*sizes.prod(-1).tolist(), *sizes.repeat_interleave(sizes[:, 0] // 9, 0)[:, 0].tolist()],
    "steps": lambda sizes: (torch.cumsum(sizes.prod(-1), 0).diff(prepend=torch.zeros(1, dtype=torch.long))).tolist(),
}


def inputs(sizes: Any = ((1, 2), (2, 2), (3, 1), (1, 3))) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor(sizes)
    rows = int(table.prod(1).sum())
    return {
        "words": torch.randn(len(table), 5, WIDTH, generator=generator, dtype=torch.float64),
        "patches": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        "sizes": table,
    }


def model(read: str = "list") -> Images:
    torch.manual_seed(0)
    return Images(READS[read]).double()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("role", ["data", "sequence"])
def test_values_of_sizes_are_numbers(read: str, role: str) -> None:
    with pytest.warns(UserWarning, match="turns values of 'sizes' into Python numbers at .*, line"):
        report = galvatron_fx.check(model(read), 2, inputs(), Plan.uniform((2,), (role,)), steps=2)
    report.raise_if_different()


def test_micro_batches_are_refused() -> None:
    """Sizes are those of the whole batch."""
    with pytest.raises(GalvatronError, match="micro-batch"):
        galvatron_fx.plan(model(), described((2,)), inputs(), num_microbatches=2)


class Bounded(nn.Module):
    """Looks at its labels, as models with CTC losses do, takes as many steps as the longest sample has, and divides by
    a number of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        if labels.max() >= 9:
            raise ValueError("no such class")
        longest = int(lengths.max())
        h = self.out(self.layer(x)[:, :longest].tanh()).log_softmax(-1).transpose(0, 1)
        mask = labels > 0
        targets = labels.masked_select(mask)
        return torch.nn.functional.ctc_loss(h, targets, lengths, mask.sum(-1), reduction="sum") / int(lengths.sum())


def test_numbers_are_those_of_the_whole_batch_in_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(4, 20, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, 9, (4, 7), generator=generator) * torch.tensor([1, 1, 0, 1, 0, 1, 0])
    batch = x, labels * (torch.arange(4) != 2)[:, None], torch.tensor([17, 12, 9, 14])
    plan = galvatron_fx.plan(Bounded().double(), described((2,)), batch, roles=("data",), num_microbatches=2)
    for each in (plan, Plan.uniform((2,), ("data",))):
        galvatron_fx.check(Bounded().double(), 2, batch, each, steps=2).raise_if_different()


def test_graphs_of_other_inputs_decide_by_these() -> None:
    x, labels = torch.randn(4, 20, WIDTH, dtype=torch.float64), torch.ones(4, 7).long()
    captured = galvatron_fx.Captured(Bounded().double(), (x, labels, torch.tensor([17, 12, 9, 14])))
    for lengths, expected in ([15, 12, 9, 14], [False, 15, 50]), ([19, 3], [False, 19, 22]):
        batch = x[: len(lengths)], labels[: len(lengths)], torch.tensor(lengths)
        assert [decision.value for decision in signature(captured.graph_of(batch)).decisions] == expected


def test_numbers_of_other_batches_are_their_own(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    original = Bounded().double()
    first = torch.randn(4, 20, WIDTH, dtype=torch.float64), torch.ones(4, 7).long(), torch.tensor([17, 12, 9, 14])
    compiled = galvatron_fx.compile(original, mesh, first, plan=Plan.uniform((1,), ("data",)))
    fewer = first[0][:2], first[1][:2], torch.tensor([15, 19])
    others = [(*first[:2], torch.tensor(lengths)) for lengths in ([17, 12, 9, 13], [20, 12, 9, 10])]
    for batch in (first, fewer, *others, first):
        torch.testing.assert_close(compiled.forward_backward(*batch), original(*batch), rtol=1e-10, atol=0)


def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of all traces from here on."""
    shapes: list[Any] = []
    trace = capture._trace
    monkeypatch.setattr(capture, "_trace", lambda *args: shapes.append(args[1]) or trace(*args))
    return shapes


def test_a_model_that_is_refused_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traces(monkeypatch)
    with pytest.raises(CaptureError, match="turns the value of a tensor into a Python number"):
        galvatron_fx.capture(Lengths(lambda ids: float(ids.sum())), (torch.randn(4, WIDTH), torch.ones(4)))
    assert len(traced) == 2  # once more with values of the input allowed, which are no counts


def test_each_way_to_decide_has_one_program(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = galvatron_fx.compile(model(), mesh, inputs(), plan=Plan.uniform((1,), ("data",)))
    made: list[FlatInputs] = []
    traced = traces(monkeypatch)
    compared: list[None] = []
    monkeypatch.setattr(compiled._watch, "require_equal_batches", lambda: compared.append(None))
    compile_inputs = compiled._compile_inputs
    monkeypatch.setattr(compiled, "_compile_inputs", lambda twin, flat: made.append(flat) or compile_inputs(twin, flat))

    def programs_after(*sizes: Any) -> int:
        for each in sizes:
            batch = inputs(each)
            torch.testing.assert_close(compiled.forward_backward(**batch), model()(**batch), rtol=1e-10, atol=0)
        return len(made)

    first, turned = ((1, 2), (2, 2), (3, 1), (1, 3)), ((2, 1), (2, 2), (1, 3), (3, 1))
    other, last = ((2, 2), (2, 1), (1, 3), (3, 1)), ((3, 1), (1, 3), (2, 2), (2, 1))  # as many patches
    assert programs_after(first, turned) == 0  # forward makes the same numbers of both
    assert not compared
    assert programs_after(other, first, other) == 1
    assert len(compared) == 3  # ranks ask each other wherever one takes another program than before
    assert len(traced) == 1  # what it may decide by, and that it is for these sizes alone, is known
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs(other)), model()(**inputs(other)), rtol=1e-10, atol=0)
    with pytest.warns(UserWarning, match=r"in <lambda>.*, and 3 programs were made for batches of the same shapes"):
        monkeypatch.setattr("galvatron_fx.runtime.programs._TOLD", (3,))
        assert programs_after(last) == 2  # evaluation takes the same
    monkeypatch.setattr("galvatron_fx.runtime.programs._MOST", 3)
    assert programs_after(((1, 1), (1, 2), (2, 2), (1, 5)), last, other) == 3
    assert programs_after(first) == 4  # which was not called for longest


def test_own_rows_are_refused() -> None:
    flat = FlatInputs.of(inputs())
    decision = Decision(Computation((Step(Tensor.sum, (Given("sizes"),), {}),)), 15, "number", "line 1")
    require_whole([decision], flat, [])
    remedies = r"takes those of all rows: compile\(\.\.\., batch='gather'\) .*or pass the global batch"
    with pytest.raises(InputError, match=remedies):
        require_whole([decision], flat, [flat.input_names.index("sizes")])


class Lengths(nn.Module):
    """Asks for values of what it is given in ways that are no sizes."""

    def __init__(self, of: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(WIDTH, WIDTH), of

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x).square().mean() * self.of(ids)


def written(ids: Tensor) -> float:
    """What is read was written in place, through a view, and beside what was read before."""
    mask, table = ids > 1, torch.zeros(4, dtype=torch.long)
    table[1] = 3
    row = mask[0]
    row |= ~mask.any()
    copy = ids.clone()
    copy[1:] += table[1:]
    return float(mask.sum() + copy.add_(2).sum() + ids.sum())


def test_values_that_were_written_are_numbers() -> None:
    ids = torch.ones(4, dtype=torch.long)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    assert written(ids) == 20
    report = galvatron_fx.check(Lengths(written), 2, (x, ids), Plan.uniform((2,), ("data",)))
    report.raise_if_different()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "of, ids",
    [
        (lambda ids: ids.float().add(torch.rand(1)).sum().item(), torch.ones(4, dtype=torch.long)),  # random
        (lambda ids: float(ids.sum()), torch.ones(4)),  # another one in every batch
        (lambda ids: float(ids.mul_(torch.rand(4)).sum()), torch.ones(4)),  # written by what is drawn
        (lambda ids: float(sum(ids.flatten().tolist())), torch.ones(4, 500, dtype=torch.long)),  # too many
        (lambda ids: float(ids.sum()), torch.ones(4, dtype=torch.long, device="meta")),
    ],
)
def test_other_values_are_refused(of: Callable[[Tensor], float], ids: Tensor) -> None:
    with pytest.raises(CaptureError, match="turns the value of a tensor into a Python number"):
        galvatron_fx.capture(Lengths(of), (torch.randn(4, WIDTH, generator=torch.Generator()), ids))

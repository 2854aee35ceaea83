"""Code that no graph can say is refused in a few lines, which name the user's own and what to write instead."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError

LOG: list[float] = []


class Model(nn.Module):
    """A linear layer, and ``body`` as its forward."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer, x)


def keeps_an_item(layer: nn.Module, x: Tensor) -> Tensor:
    loss = layer(x).sum()
    LOG.append(loss.item())  # here
    return loss


def prints_a_number(layer: nn.Module, x: Tensor) -> Tensor:
    loss = layer(x).sum()
    print(f"{loss:.3f}")  # here
    return loss


def reads_a_number(layer: nn.Module, x: Tensor) -> Tensor:
    count = int(x[0, 0].abs())  # here
    return layer(x)[:, : count + 1].sum()


def asserts(layer: nn.Module, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"  # here
    return layer(x).sum()


def branches(layer: nn.Module, x: Tensor) -> Tensor:
    if (x > 1).any():  # here
        return layer(-x).sum()
    return layer(x).sum()


def branches_in_a_line(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sum() if x.sum() > 0 else layer(-x).sum()  # here


def compares(layer: nn.Module, x: Tensor) -> Tensor:
    if torch.equal(x, 2 * x):  # here
        return layer(-x).sum()
    return layer(x).sum()


def drops_at_random(layer: nn.Module, x: Tensor) -> Tensor:
    if torch.rand([]) < 0.5:  # here
        return x.sum()
    return layer(x).sum()


def loops_while(layer: nn.Module, x: Tensor) -> Tensor:
    while x.norm() > 1:  # here
        x = x / 2
    return layer(x).sum()


def loops_so_often(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(x.abs().sum().long()):  # here
        x = x / 2
    return layer(x).sum()


def indexes_by_a_mask(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x[x[:, 0] > 0]).max()  # here


def selects(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).masked_select(x[:, :3] > 0).max()  # here


def looks_for_places(layer: nn.Module, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0).nonzero().squeeze(1)  # here
    return layer(x[rows]).amax()


def lists_distinct_values(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sum() * torch.unique(x).sum()  # here


def counts(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sum() * torch.bincount(x[:, 0].abs().long()).sum()  # here


def lists_counts(layer: nn.Module, x: Tensor) -> Tensor:
    parts = x.split(torch.bincount((x[:, 0] > 0).long(), minlength=2).tolist())  # here
    return layer(parts[0]).sum()


def leaves_torch(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).sum() * float(x.detach().numpy().max())  # here


@pytest.mark.parametrize(
    ("body", "what", "remedy"),
    [
        (keeps_an_item, "reads the value of a tensor to print or keep it", "one more output and print or log it after"),
        (prints_a_number, "prints the value", "one more output and print it after the step"),
        (reads_a_number, "into a Python number", "pass one that sets a size or a count as a Python number"),
        (asserts, "asserts something", "if not torch.compiler.is_compiling(): assert"),
        (branches, "decides by the value", "choose by torch.where"),
        (branches_in_a_line, "decides by the value", "choose by torch.where"),
        (compares, "decides by the value", "choose by torch.where"),
        (drops_at_random, "decides by the value", "set its probability to 0"),
        (loops_while, "loops by the value", "a fixed number of times"),
        (loops_so_often, "loops by the value", "a fixed number of times"),
        (indexes_by_a_mask, "indexes by a mask", "torch.where(mask, x, 0)"),
        (selects, "aten.masked_select.default", "torch.where(mask, x, 0)"),
        (looks_for_places, "aten.nonzero.default", "the condition itself as a mask"),
        (lists_distinct_values, "aten._unique2.default", "where batches are made"),
        (counts, "aten.bincount.default", "torch.bincount(x, minlength=classes)"),
        (lists_counts, "turns the values of a tensor into Python numbers", "multiply them in groups"),
        (leaves_torch, "leaves PyTorch for NumPy", "the function of torch"),
    ],
)
def test_each_has_its_own_remedy(
    body: Callable[[nn.Module, Tensor], Tensor], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_hidden = Model(lambda layer, x: body(layer, x + layer.weight[0]))  # of inputs forward may know more
    with pytest.raises(CaptureError) as caught:
        galvatron_fx.capture(of_hidden, {"x": torch.randn(4, 6)})
    message = str(caught.value)
    assert f"Model {what}" in message or what in message
    assert remedy in message
    line = body.__code__.co_firstlineno
    source = Path(__file__).read_text().splitlines()
    here = next(number for number, text in enumerate(source, 1) if number > line and text.endswith("# here"))
    assert f'File "{__file__}", line {here}, in {body.__name__}' in message
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 25
    assert caught.value.__context__ is not None, "what torch says is kept"
    assert "Traceback" not in capsys.readouterr().err


def test_a_draw_behind_a_probability_of_zero_is_passed() -> None:
    """The remedy given for layers that are dropped works; it is given where something is drawn."""

    def body(layer: nn.Module, x: Tensor) -> Tensor:
        p = 0.0
        return x.sum() if p > 0 and torch.rand([]) < p else layer(x).sum()

    assert galvatron_fx.capture(Model(body), {"x": torch.randn(4, 6)}) is not None
    with pytest.raises(CaptureError, match=r"choose by torch\.where") as caught:
        galvatron_fx.capture(Model(branches), {"x": torch.randn(4, 6)})
    assert "random" not in str(caught.value)


def test_masks_of_bytes_are_taken_as_torch_takes_them() -> None:
    """As torchcrf makes them."""

    def body(layer: nn.Module, x: Tensor) -> Tensor:
        mask = torch.arange(len(x)).remainder(2).byte()[:, None]
        return (torch.where(mask, layer(x), x[:, :3]) + layer(x).where(mask, 2 * x[:, 3:])).square().sum()

    report = galvatron_fx.check(Model(body), 2, {"x": torch.randn(4, 6)}, Plan.uniform((2,), ("data",)))
    assert report.ok, report


def test_an_assertion_behind_is_compiling_is_passed() -> None:
    """The remedy given for assertions works."""

    def body(layer: nn.Module, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            assert (x < 100).all()
        return layer(x).sum()

    assert galvatron_fx.capture(Model(body), {"x": torch.randn(4, 6)}) is not None


@pytest.mark.parametrize("keeps", [False, True])
def test_values_that_are_made_only_where_nothing_compiles_are_made(keeps: bool) -> None:
    """As of transformers' Switch and LongT5, which are told in a trace that they are compiled, and lack a mask then."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 3), 0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += keeps  # then it is traced in several steps, too
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.ones(x.shape[:1])
            return (self.layer(x) * mask[:, None]).square().sum()

    found = galvatron_fx.check(Masked(), 2, {"x": torch.randn(4, 6)}, Plan.uniform((2,), ("data",)))
    assert found.ok, str(found)


def test_what_fails_compiled_and_not_is_told_of_both() -> None:
    def body(layer: nn.Module, x: Tensor) -> Tensor:
        mask = None
        if not torch.compiler.is_compiling():
            assert (layer(x) < 100).all()
            mask = x
        return (layer(x) * mask[:, :3]).sum()

    with pytest.raises(CaptureError, match="asserts something") as caught:
        galvatron_fx.capture(Model(body), {"x": torch.randn(4, 6)})
    (note,) = caught.value.__notes__
    assert note.startswith("Where torch.compiler.is_compiling() says yes: ") and "'NoneType'" in note


def test_operators_of_control_flow_are_refused() -> None:
    def body(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: layer(-x), (x,)).sum()

    with pytest.raises(CaptureError, match=r"(?s)calls an operator of control flow.*take one by torch.where"):
        galvatron_fx.capture(Model(body), {"x": torch.randn(4, 6)})


def test_inputs_that_do_not_fit_are_told_in_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="must have same reduction dim") as caught:
        galvatron_fx.capture(Model(lambda layer, x: layer(x).sum()), {"x": torch.randn(4, 7)})
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 25
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "torch logs nothing of it"


def test_the_whole_trace_is_logged_for_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="galvatron_fx.capture"), pytest.raises(CaptureError):
        galvatron_fx.capture(Model(branches), {"x": torch.randn(4, 6)})
    assert any(record.exc_info for record in caplog.records)


class Reversible(torch.autograd.Function):
    """Its backward takes gradients by itself, as those of reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return layer(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch.manual_seed(ctx.layer.seed)  # that forward would have left there
        return grad, None


def test_a_backward_of_ones_own_that_reads_what_forward_left_is_refused() -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        layer.seed = 3
        return Reversible.apply(x * layer.weight.sum(), layer).sum()

    model = Model(body)
    model.layer.seed = None  # type: ignore[assignment]
    with pytest.raises(
        CaptureError, match=r"(?s)backward of an autograd.Function cannot be traced: .*keep what backward needs on ctx"
    ):
        galvatron_fx.capture(model, {"x": torch.randn(4, 6)})

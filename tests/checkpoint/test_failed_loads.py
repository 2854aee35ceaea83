"""Loading that fails leaves model, optimizer and all else as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.checkpoint import snapshot
from galvatron_fx.errors import CheckpointError
from tests.checkpoint.one_weight import Training

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone


class Part:
    """A scheduler or loader that may refuse a state, having taken half of it."""

    def __init__(self, value: int, refused: int | None = None, is_mute: bool = False) -> None:
        self.value, self.refused, self.is_mute = value, refused, is_mute

    def state_dict(self) -> dict[str, Any]:
        if self.is_mute:
            raise RuntimeError("not begun")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] == self.refused:
            self.value = -1
            raise KeyError("no such shard")
        self.value = state["value"]


class Stubborn(Part):
    """Takes no state at all, not even its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("no such shard")


class _RefusingAdam(torch.optim.Adam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.param_groups[0]["lr"] == 0.5:
            raise RuntimeError("no such rate")


def _adam(model: nn.Module, kind: type[torch.optim.Optimizer], rate: float) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=rate)  # type: ignore[call-arg]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return optimizer


def _values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_values(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("who", ["optimizer", "scheduler", "loader", "disk", "generators"])
def test_loading_that_fails_leaves_all_as_it_was(tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(tmp_path)
    kind = type("Adam", (_RefusingAdam,), {}) if who == "optimizer" else torch.optim.Adam
    optimizer = _adam(run.model, torch.optim.Adam, 0.5)
    state: dict[str, Any] = {"optimizer": optimizer, "scheduler": Part(1), "loader": Part(2)}
    run.checkpoints.save(1, model=run.model, **state)

    model = nn.Linear(1, 1, bias=False)
    given: dict[str, Any] = {
        "model": model, "optimizer": _adam(model, kind, 0.1),
        "scheduler": Part(3, 1 if who == "scheduler" else None), "loader": Part(4, 2 if who == "loader" else None),
    }  # fmt: skip
    before = {name: copy.deepcopy(thing.state_dict()) for name, thing in given.items()}
    groups = [id(p) for group in given["optimizer"].param_groups for p in group["params"]]
    drawn = torch.get_rng_state()
    if who == "disk":
        monkeypatch.setattr(snapshot.tensor_files, "read", _fail_after(snapshot.tensor_files.read))
    if who == "generators":
        monkeypatch.setattr(snapshot.generators, "restore", _fail_once(snapshot.generators.restore))
    with pytest.raises(CheckpointError, match=r"no such|disk fails"):
        run.checkpoints.load(**given)
    for name, thing in given.items():
        assert _values(thing.state_dict()) == _values(before[name]), name
    assert groups == [id(p) for group in given["optimizer"].param_groups for p in group["params"]]
    assert torch.equal(drawn, torch.get_rng_state())
    given["optimizer"].step()


def _fail_after(work: Callable[..., None]) -> Callable[..., None]:
    def fails(*arguments: Any) -> None:
        work(*arguments)
        raise CheckpointError("the disk fails")

    return fails


def _fail_once(work: Callable[..., None]) -> Callable[..., None]:
    calls: list[int] = []

    def fails(*arguments: Any) -> None:
        calls.append(0)
        if len(calls) == 1:
            raise KeyError("no such generator")
        work(*arguments)

    return fails


@pytest.mark.parametrize("part, reason", [
    (Part(2, refused=1, is_mute=True), "RuntimeError: not begun"),
    (Stubborn(2), "KeyError: 'no such shard'"),
])  # fmt: skip
def test_a_part_that_cannot_go_back_is_named_with_the_reason(tmp_path: Path, part: Part, reason: str) -> None:
    run = Training(tmp_path)
    run.checkpoints.save(1, model=run.model, loader=Part(1))
    before = run.model.weight.detach().clone()
    nn.init.zeros_(run.model.weight)
    with pytest.raises(CheckpointError, match=rf"and the loader \({reason}\) would not take back its state .* anew"):
        run.checkpoints.load(model=run.model, loader=part)
    assert run.model.weight.item() == 0 != before.item()

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from galvatron_fx.checkpoint import Checkpointer, lock
from galvatron_fx.errors import CheckpointError, InputError
from tests.checkpoint.damage import Damage, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # torch warns that one process is alone


def saved(folder: Path, *steps: int, **options: Any) -> Checkpointer:
    model, optimizer = trained()
    checkpoints = Checkpointer(folder, **options)
    for step in steps:
        checkpoints.save(step, model=model, optimizer=optimizer)
    checkpoints.wait()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != lock.NAME)


def test_an_empty_folder_has_nothing_to_load(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "none")
    assert checkpoints.load(model=nn.Linear(1, 1)) is None
    assert checkpoints.latest() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_retention_keeps_the_last_and_every_fourth(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = saved(tmp_path, *range(1, 8), keep=2, every=4, asynchronous=asynchronous)
    assert names(tmp_path) == ["step-0000000004", "step-0000000006", "step-0000000007"]
    assert checkpoints.latest() == 7


@pytest.mark.parametrize("seed", range(14))
def test_any_damage_is_refused_by_the_name_of_the_file(tmp_path: Path, seed: int) -> None:
    saved(tmp_path / "sound", 5)
    model, optimizer = trained()
    Damage(seed, tmp_path / "sound", tmp_path / "damaged").is_refused(model, optimizer)


def test_latest_leaves_out_what_is_torn_and_says_so(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3)
    state = tmp_path / "step-0000000003" / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    (tmp_path / "step-0000000002" / "manifest.json").unlink()
    (tmp_path / ".writing-step-0000000004-00000000").mkdir()
    with pytest.warns(UserWarning) as said:
        assert checkpoints.latest() == 1
    texts = " ".join(str(warning.message) for warning in said)
    assert "state.json has" in texts and "manifest.json is missing" in texts and "never completed" in texts
    with pytest.warns(UserWarning):
        restored = checkpoints.load(model=trained()[0])
    assert restored is not None and restored.step == 1


def test_a_damaged_step_is_passed_over_replaced_and_never_started_anew(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    model, optimizer = trained()
    for step, expected in ((2, 1), (1, None)):
        shard = next((tmp_path / f"step-{step:010d}").glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        if expected:
            with pytest.warns(UserWarning, match=f"step {step} is left out: .*{shard.name} does not hold what"):
                restored = checkpoints.load(model=model, optimizer=optimizer)
            assert restored is not None and restored.step == expected
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match=r"none of the checkpoints \[1, 2\]"):
        checkpoints.load(model=model, optimizer=optimizer)
    checkpoints.save(2, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="is there already and intact"):
        checkpoints.save(2, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 7: it has"):
        checkpoints.load(model=model, step=7)


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    model, optimizer = trained()
    before = [value.clone() for value in model.state_dict().values()]
    checkpoints = Checkpointer(tmp_path, asynchronous=True)
    checkpoints.save(1, model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoints.load(model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def build(kind: type[torch.optim.Optimizer], options: dict[str, Any], schedule: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = kind(model.named_parameters(), **options)
    return model, optimizer, schedule(optimizer)


def step(model: nn.Module, optimizer: Any, scheduler: Any) -> float:
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(loss)


RATES = torch.optim.lr_scheduler
SETTINGS: list[Any] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, lambda o: RATES.MultiStepLR(o, [2, 3])),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, lambda o: RATES.OneCycleLR(o, 0.1, 20)),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}, lambda o: RATES.ExponentialLR(o, 0.9)),
    (torch.optim.Adam, {"fused": True}, lambda o: RATES.CosineAnnealingWarmRestarts(o, 3)),
    (torch.optim.Adafactor, {}, lambda o: RATES.SequentialLR(o, [RATES.LinearLR(o), RATES.StepLR(o, 2)], [2])),
    (torch.optim.Adagrad, {}, lambda o: RATES.LambdaLR(o, lambda epoch: 0.9**epoch)),
    (torch.optim.NAdam, {}, lambda o: RATES.CyclicLR(o, 0.01, 0.1, cycle_momentum=False)),
    (torch.optim.ASGD, {}, lambda o: RATES.PolynomialLR(o)),
]


@pytest.mark.filterwarnings("ignore")  # of schedulers
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[0].__name__)
def test_optimizers_and_schedulers_go_on_bit_for_bit(tmp_path: Path, setting: Any) -> None:
    run = build(*setting)
    for _ in range(3):
        step(*run)
    checkpoints = Checkpointer(tmp_path)
    state = dict(zip(("model", "optimizer", "scheduler"), run, strict=True))
    checkpoints.save(3, **state, extra={"seen": (1, 2.5)})
    expected = [step(*run) for _ in range(3)]
    again = build(*setting)
    restored = checkpoints.load(**dict(zip(state, again, strict=True)))
    assert restored is not None and restored.extra == {"seen": (1, 2.5)}
    assert [step(*again) for _ in range(3)] == expected


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    refused: list[tuple[nn.Module, Any, str]] = []
    model, _ = trained()
    refused.append((trained()[0], torch.optim.Adam(trained()[0].parameters()), "optimizer trains a parameter that"))
    refused.append((model, torch.optim.SGD(model.parameters()), "holds the state of Adam, not of SGD"))
    refused.append((trained()[0].float(), None, "model.0.weight is float64 there and float32 in the model"))
    refused.append((nn.Sequential(nn.Linear(4, 8)).double(), None, "model.1.bias is not one of the model's"))
    refused.append((nn.Sequential(*trained()[0], nn.Linear(2, 2)).double(), None, "model.3.weight is missing"))
    for other, optimizer, words in refused:
        before = [value.clone() for value in other.state_dict().values()]
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load(model=other, optimizer=optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, other.state_dict().values(), strict=True))


def test_parts_that_were_not_saved_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=model)
    scheduler = RATES.StepLR(optimizer, 1)
    for part in ({"optimizer": optimizer}, {"scheduler": scheduler}, {"loader": scheduler}):
        with pytest.raises(CheckpointError, match=f"holds no {next(iter(part))}"):
            checkpoints.load(model=model, **part)


def test_counts_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(InputError, match="step is -1"):
        Checkpointer(tmp_path).save(-1, model=nn.Linear(1, 1))


def test_no_pickle_is_written(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    files = names(tmp_path / "step-0000000001")
    assert [Path(name).suffix for name in files] == [".json", ".safetensors", ".json"]


def test_a_copied_folder_loads(tmp_path: Path) -> None:
    saved(tmp_path / "first", 1)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = Checkpointer(tmp_path / "second").load(model=trained()[0])
    assert restored is not None and restored.step == 1

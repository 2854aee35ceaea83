"""What torch and its optimizers do to whole models: as without compiling, or refused with the remedy."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import galvatron_fx
from galvatron_fx.errors import InputError
from tests.seams.one_rank import Net, batch, frozen_norm, modes, normed, pair, same_step, with_logits

# ---- what torch does to whole models ----


def test_copies_have_weights_and_modes_of_their_own(mesh: DeviceMesh) -> None:
    compiled, plain = normed(mesh, frozen_norm)
    other = copy.deepcopy(compiled)
    for model in (compiled, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        (model(**batch())).backward()
        optimizer.step()
    kept = copy.deepcopy(other)
    assert modes(kept) == modes(compiled)
    kept.train()
    assert modes(kept) != modes(compiled)
    same_step(compiled, plain)
    same_step(other, copy.deepcopy(normed(mesh, frozen_norm)[1]))
    with pytest.raises(InputError, match=r"cannot be pickled.*: save its weights with galvatron_fx.save_weights"):
        pickle.dumps(compiled)


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_weights(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    compiled, plain = normed(mesh, frozen_norm)
    averages = []
    for model in (compiled, plain):
        average = AveragedModel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            model(**batch()).backward()
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            averages.append(average.eval()(**batch()))
    torch.testing.assert_close(*averages, rtol=1e-10, atol=0)


def test_norms_are_not_renewed_by_torch(mesh: DeviceMesh) -> None:
    compiled, _ = normed(mesh)
    with pytest.raises(InputError, match=r"body\.1\.reset_running_stats\(\) of a compiled model starts what.*gather"):
        update_bn([batch()["x"]], compiled)


def test_a_scaler_scales_the_loss(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    scales = []
    for model in (compiled, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for blow_up in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(**batch())["loss"] * blow_up).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).full_tensor(), parameter, rtol=1e-10, atol=1e-12)


def test_a_scaler_does_not_divide_what_it_did_not_scale(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(compiled.forward_backward(**batch())["loss"])
    with pytest.raises(
        InputError, match=r"GradScaler divides gradients that forward_backward made.*bfloat16 needs none"
    ):
        scaler.step(optimizer)


# ---- optimizers ----


def test_states_that_the_plan_does_not_count_are_told_of_once(mesh: DeviceMesh) -> None:
    plain = Net(with_logits).double()
    compiled = galvatron_fx.compile(plain, mesh, batch(), optimizer="sgd")
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled.forward_backward(**batch())
    states = 2 * 8 * (6 * 8 + 8 + 8 * 3 + 3)
    with pytest.warns(UserWarning, match=rf"this AdamW keeps .*\({states} bytes\) .* counts 0 B \(0 bytes\).*='sgd'"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        torch.optim.SGD(compiled.parameters(), lr=0.1).step()


def test_states_that_the_plan_counts_are_not_told_of(mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(Net(with_logits).double(), mesh, batch())
    compiled.forward_backward(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (torch.optim.AdamW, torch.optim.Adafactor):
            make(compiled.parameters()).step()

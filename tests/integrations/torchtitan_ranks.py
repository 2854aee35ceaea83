"""Run by test_torchtitan.py: torchtitan's Trainer with plans on two ranks, beside a loop on one device.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset
from torchtitan.tools import utils

# torchtitan asks its device for names and memory, which CPUs do not tell.
utils.device_type, utils.device_module = "cpu", torch.cpu
from torchtitan.components import metrics  # noqa: E402

metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
    reset_peak_stats=lambda: None,
)
from torchtitan import trainer as trainer_module  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import galvatron_fx  # noqa: E402
from galvatron_fx import Plan  # noqa: E402
from galvatron_fx.integrations.torchtitan import planned  # noqa: E402
from galvatron_fx.ir.errors import InputError  # noqa: E402
from tests.runtime.launch import fork_checks  # noqa: E402

distributed.set_pg_timeouts = lambda **_: None
trainer_module.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

ROWS, LENGTH, STEPS, ACCUMULATE, IGNORED = 2, 16, 3, 2, -100
FOLDER = Path(".")


class Documents(IterableDataset[Any]):
    """Rows of packed documents, with unlike numbers of labels; those of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        draws = torch.Generator().manual_seed(7)
        for row in range(10**6):
            tokens = torch.randint(2048, (LENGTH + 1,), generator=draws)
            cut, ignored = torch.randint(1, LENGTH, (2,), generator=draws).tolist()
            positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            labels = tokens[1:].masked_fill(torch.arange(LENGTH) < ignored, IGNORED)
            if row // ROWS % self.size == self.rank:
                yield {"input": tokens[:-1], "positions": positions}, labels


class Loader(ParallelAwareDataloader):
    """A loader of torchtitan's, of documents made here."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What a validator asks for."""

        infinite: bool = True

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Documents(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """Its rows are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Of nothing."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None  # type: ignore[assignment]


def configured(folder: str = "", **changes: Any) -> Trainer.Config:
    """torchtitan's own configuration of its small LLaMA, of two layers, as a user changes it."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training = TrainingConfig(
        local_batch_size=ROWS, global_batch_size=2 * ROWS * ACCUMULATE, seq_len=LENGTH, steps=STEPS,
        mixed_precision_param="float32",
    )  # fmt: skip
    config.dataloader, config.tokenizer = Loader.Config(), NoTokenizer.Config()
    config.validator = replace(config.validator, enable=True, freq=STEPS, steps=2, dataloader=Loader.Config())
    config.checkpoint = CheckpointManager.Config(enable=bool(folder), interval=2, last_save_model_only=False)
    config.dump_folder = folder
    config.optimizer = default_adamw(lr=1e-3, eps=1e-4)  # rounding of gradients near 0 is no step of its own
    return replace(config, **changes)


def trained(config: Trainer.Config) -> tuple[Trainer, dict[str, Tensor], list[float]]:
    """The trainer after its steps, the weights before, and what it logged: losses and norms of each step."""
    trainer = config.build()
    before = whole(trainer)
    logged: list[float] = []
    validated: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: logged.extend((loss, norm))
    trainer.metrics_processor.log_validation = lambda loss, step: validated.append(loss)
    trainer.train()
    trainer.close()
    logged += validated[-1:]
    return trainer, before, logged


def whole(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in trainer.model_parts[0].named_parameters()}


def on_one_device(config: Trainer.Config, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    """What a loop trains, of torchtitan's parts, on the rows of both ranks."""
    model = config.model_spec.model.build()
    model.init_states()
    model.load_state_dict(weights, strict=False)
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    logged: list[float] = []

    def loss_of(batch: Any) -> Tensor:
        positions = batch[0]["positions"]
        outputs = model(batch[0]["input"], positions=positions, attention_masks=masks(positions))
        loss: Tensor = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), reduction="sum")
        return loss

    def batches() -> Iterator[Any]:
        rows = iter(torch.utils.data.DataLoader(Documents(0, 1), batch_size=2 * ROWS))
        return rows

    rows = batches()
    for _ in range(STEPS):
        step = [next(rows) for _ in range(ACCUMULATE)]
        count = sum(int((labels != IGNORED).sum()) for _, labels in step)
        optimizers.zero_grad()
        losses = [loss_of(batch) / count for batch in step]
        for loss in losses:
            loss.backward()
        norm = distributed.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizers.step()
        schedulers.step()
        logged += [float(sum(losses)), float(norm)]
    with torch.no_grad():
        rows, parts = batches(), []
        parts = [next(rows) for _ in range(2)]
        total = sum(float(loss_of(batch)) for batch in parts)
    logged.append(total / sum(int((labels != IGNORED).sum()) for _, labels in parts))
    return dict(model.named_parameters()), logged


def masks(positions: Tensor) -> Tensor:
    """By torchtitan's own functions of masks."""
    place = torch.arange(LENGTH)
    at = torch.arange(len(positions))[:, None, None], torch.zeros((), dtype=torch.int64), place[:, None], place
    return (get_causal_mask_mod()(*at) & get_efficient_causal_mask_mod_for_packed_document(positions)(*at))[:, None]


def close(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    worst = max(float((mine[name] - other[name]).detach().abs().max()) for name in mine)
    assert worst < 2e-6, worst


def trains_and_goes_on(mesh: DeviceMesh) -> None:
    """Three steps and a validation; then from the checkpoint of the second step, under another plan."""
    config = planned(configured(str(FOLDER)), plan=Plan.uniform((2,), ("zero",)))
    trainer, before, logged = trained(config)
    weights, expected = on_one_device(config, before)
    assert logged[::2] == pytest.approx(expected[::2], rel=1e-6)
    assert logged[1::2] == pytest.approx(expected[1::2], rel=2e-4)  # torch's norms of float32 are no closer
    close(whole(trainer), weights)
    config = planned(configured(str(FOLDER)), plan=Plan.uniform((2,), ("tensor",)), seed=1)
    config.checkpoint.load_step = 2
    trainer, _, again = trained(config)
    assert again == pytest.approx(logged[4:], rel=2e-4)
    close(whole(trainer), weights)


def refuses(mesh: DeviceMesh) -> None:
    """What a plan chooses, and what torchtitan would do with stages."""

    def refused(match: str, changes: dict[str, Any], config: Any = None, **options: Any) -> None:
        config = planned(config or configured(), **{"plan": Plan.uniform((2,), ("zero",)), **options})
        with pytest.raises(InputError, match=match):
            replace(config, **changes).build()

    refused("tensor_parallel_degree=2: the plan says", {"parallelism": of_plan(tensor_parallel_degree=2)})
    refused("as planned.* sets them", {"parallelism": ParallelismConfig()})
    training = configured().training
    refused("enable_cpu_offload", {"training": replace(training, enable_cpu_offload=True)})
    refused("CUDA|cuda", {"training": replace(training, disable_cuda_graphs=False)})
    stages = Plan.uniform((2,), ("pipeline",), pipelining=galvatron_fx.Pipelining(2, 2))
    refused("a plan without stages", {}, plan=stages)
    masked = gpt_oss_debugmodel()
    refused("GptOssModel is no decoder with", {}, config=masked)
    with pytest.raises(InputError, match="names no model"):
        planned(configured(model_spec=None))


def of_plan(**changes: Any) -> ParallelismConfig:
    return ParallelismConfig(spmd_backend="partial_dtensor", **changes)


CHECKS = {"trains_and_goes_on": trains_and_goes_on, "refuses": refuses}


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    fork_checks((2,), CHECKS, sys.argv[2:], lambda: None)

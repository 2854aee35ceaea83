"""Trainer and Accelerate on two ranks, beside a loop on one device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import DataLoaderConfiguration, DistributedDataParallelKwargs, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator
from transformers.trainer_pt_utils import LabelSmoother

from galvatron_fx import DistributedGraphModule, Pipelining, Plan
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.integrations.accelerate import Accelerator
from galvatron_fx.integrations.even_lengths import even_lengths
from galvatron_fx.integrations.transformers import GalvatronMixin, Trainer
from tests.passes.frontend.test_follow_batch import Words
from tests.passes.frontend.test_follow_batch import batch as pictures
from tests.runtime.launch import Check

FOLDER = Path(".")  # the script that runs the checks says it
RATE, STEPS, ACCUMULATE, CLIP = 1e-2, 3, 2, 0.5
STAGES = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "1f1b"))


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=False, **sizes)).double()


class Rows(Dataset[dict[str, Tensor]]):
    """Token ids, with unlike numbers of labels."""

    def __init__(self, count: int = 4 * ACCUMULATE * STEPS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(32, (count, 6), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(count, 6, generator=generator) < 0.4, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int | slice) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def on_one_device() -> tuple[list[float], LlamaForCausalLM]:
    """The losses and the model of a plain loop over the same rows: AdamW, clipped, a linear schedule."""
    model, rows, losses = language_model(), Rows(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for step in range(STEPS):
        first = 4 * ACCUMULATE * step
        items = rows[first : first + 4 * ACCUMULATE]["labels"][:, 1:].ne(-100).sum()
        losses.append(0.0)
        for part in range(ACCUMULATE):
            loss = model(**rows[first + 4 * part : first + 4 * part + 4], num_items_in_batch=items).loss
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, model


class OwnLoss(transformers.Trainer):
    """Computes the loss from outputs, as people's Trainers do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        checkpoints = model.is_gradient_checkpointing
        if checkpoints:  # as TRL does around a model of reference
            model.activation_checkpointing_disable()
        outputs = model(**inputs)
        if checkpoints:
            model.activation_checkpointing_enable()
        logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        loss = cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss


class OwnLossTrainer(GalvatronMixin, OwnLoss):
    """With a plan."""


class TakesLoss(Trainer):
    """Computes a loss of the model's own loss alone, scaled as transformers' Trainer does."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Elsewhere(Trainer):
    """Computes a loss that the model has no part in."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return torch.ones((), requires_grad=True).square()


def trainer(plan: Plan, folder: Path, kind: Any = Trainer, **settings: Any) -> Any:
    given = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "logging_steps": 1, "save_steps": 2}
    arguments = TrainingArguments(
        str(folder), use_cpu=True, gradient_accumulation_steps=ACCUMULATE, max_grad_norm=CLIP, learning_rate=RATE,
        num_train_epochs=1, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
        **{"lr_scheduler_type": "linear", **given, **settings},
    )  # fmt: skip
    options = {"plan": plan, **({"takes_loss": True} if kind is TakesLoss else {})}
    return kind(language_model(), arguments, train_dataset=Rows(), eval_dataset=Rows(8), galvatron=options)


def same(got: Any, expected: Any) -> None:
    whole = got.full_tensor() if hasattr(got, "full_tensor") else torch.as_tensor(got)
    torch.testing.assert_close(whole.detach(), torch.as_tensor(expected).detach(), rtol=1e-8, atol=1e-10)


def logged(one: Any, key: str) -> list[float]:
    return [entry[key] for entry in one.state.log_history if key in entry]


def trainer_trains_and_resumes(mesh: DeviceMesh) -> None:
    """Losses of one device; resumed under another plan, with a ``compute_loss`` that takes the model's; read again."""
    losses, plain = on_one_device()
    first = trainer(Plan.uniform((2,), ("zero",)), FOLDER / "first", eval_strategy="steps", eval_steps=3)
    first.train()
    same(logged(first, "loss"), losses)
    rows = Rows(8)
    with torch.no_grad():
        batches = [plain(**rows[start : start + 4]) for start in (0, 4)]
    same(logged(first, "eval_loss")[-1], sum(batch.loss for batch in batches) / 2)
    same(first.predict(rows).predictions, torch.cat([batch.logits for batch in batches]))
    first.save_model(str(FOLDER / "saved"))
    second = trainer(STAGES, FOLDER / "first", TakesLoss)  # whose checkpoint of step 2 stays, and of step 3 is replaced
    second.train(resume_from_checkpoint=str(FOLDER / "first" / "checkpoint-2"))
    same(logged(second, "loss")[-1], losses[-1])
    for name, parameter in second.model.named_parameters():
        same(parameter, plain.get_parameter(name))
    refused(lambda: second.predict(rows), "prediction wants outputs beside the loss")
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained(FOLDER / "saved", dtype=torch.float64)
    for name, parameter in saved.named_parameters():
        same(parameter, plain.get_parameter(name))


def refused(call: Callable[[], Any], said: str, kind: type[Exception] = InputError) -> None:
    try:
        call()
    except kind as error:
        assert said in str(error), error
    else:
        raise AssertionError("it was not refused")


def trainer_refuses(mesh: DeviceMesh) -> None:
    """What would compute outside of the model."""
    plan = Plan.uniform((2,), ("data",))
    refused(lambda: trainer(plan, FOLDER, neftune_noise_alpha=1.0), "neftune_noise_alpha hooks a module")
    refused(lambda: trainer(plan, FOLDER, fsdp=True), "fsdp splits the model in a way of its own")
    local = {"average_tokens_across_devices": False, "save_strategy": "no"}
    refused(trainer(plan, FOLDER, OwnLossTrainer, **local).train, "a compute_loss that may make its loss of outputs")
    own = trainer(STAGES, FOLDER, OwnLossTrainer, save_strategy="no")
    refused(own.train, "say so by galvatron={'takes_loss': True, ...}", PlanError)
    elsewhere = trainer(plan, FOLDER, Elsewhere, save_strategy="no")
    refused(elsewhere.train, "compute_loss does not call the model that it is given")
    one = trainer(plan, FOLDER)
    one._options["batch"] = "global"
    refused(one.train, "leave them out of galvatron={...}")


def trainer_takes_a_loss_of_outputs(mesh: DeviceMesh) -> None:
    """A loss of each rank's own rows, of which the mean counts; not divided once more as one of all rows is."""
    losses, plain = on_one_device()
    one = trainer(
        Plan.uniform((2,), ("zero",)), FOLDER / "own", OwnLossTrainer, save_strategy="no", activation_checkpointing=True
    )
    one.train()
    torch.testing.assert_close(logged(one, "loss"), losses, rtol=1e-6, atol=0)  # Trainer logs in float32
    for name, parameter in one.model.named_parameters():
        same(parameter, plain.get_parameter(name))


class SharpTrainer(Trainer):
    """Adds the outputs' entropy to the loss that the model computes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + entropy(outputs.logits, num_items_in_batch) * self.args.world_size
        return (loss, outputs) if return_outputs else loss


def entropy(logits: Tensor, count: Any) -> Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum() / count


def trainer_takes_loss_and_outputs(mesh: DeviceMesh) -> None:
    """A loss that is made of the model's own and of outputs beside it."""
    given = {"max_steps": 1, "save_strategy": "no"}
    one = trainer(Plan.uniform((2,), ("tensor",)), FOLDER / "sharp", SharpTrainer, **given)
    one.train()
    plain, rows, total = language_model(), Rows()[:8], 0.0
    count = rows["labels"][:, 1:].ne(-100).sum()
    for part in (slice(4), slice(4, 8)):
        outputs = plain(input_ids=rows["input_ids"][part], labels=rows["labels"][part], num_items_in_batch=count)
        loss = outputs.loss + entropy(outputs.logits, count)
        loss.backward()
        total += loss.item()
    assert abs(logged(one, "loss")[0] - total) < 1e-5  # Trainer logs in float32
    torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0).step()
    for name, parameter in one.model.named_parameters():
        same(parameter, plain.get_parameter(name))


def trainer_smooths_labels_of_padded_rows(mesh: DeviceMesh) -> None:
    """A loss that Trainer has is compiled with the model; rows are padded to one length for all ranks."""
    given = {"label_smoothing_factor": 0.1, "max_steps": 1, "save_strategy": "no"}
    one = trainer(Plan.uniform((2,), ("zero",)), FOLDER / "smooth", **given)
    one._pads, length = True, 4 + dist.get_rank()
    rows_of_trl = {name: torch.ones(2, length, dtype=torch.int64) for name in ("input_ids", "completion_mask")}
    longer = even_lengths(rows_of_trl, torch.device("cpu"), None, {"attention_mask"})
    assert {value.shape for value in longer.values()} == {(2, 8)} and longer["completion_mask"].sum() == 2 * length
    one.data_collator = lambda rows: {key: row[:, :length] for key, row in default_data_collator(rows).items()}
    one.train()
    plain, rows, total = language_model(), Rows()[:8], 0.0
    labels = rows["labels"][:, :5].clone()
    labels[[0, 1, 4, 5], 4] = -100  # rank 0 has a column less
    count = labels[:, 1:].ne(-100).sum()
    for part in (slice(4), slice(4, 8)):
        outputs = plain(input_ids=rows["input_ids"][part, :5])
        loss = LabelSmoother(0.1)(outputs, labels[part], shift_labels=True, num_items_in_batch=count)
        loss.backward()
        total += loss.item()
    assert abs(logged(one, "loss")[0] - total) < 1e-6  # Trainer logs in float32
    torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
    torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0).step()
    for name, parameter in one.model.named_parameters():
        same(parameter, plain.get_parameter(name))


class Seen(Words):
    """Returns what a Trainer takes; its pictures differ in their sizes, which are read."""

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = self.hidden(ids, patches, sizes)
        return {"loss": hidden.square().mean(), "hidden": hidden}


class Pictures(Dataset[dict[str, Tensor]]):
    """Rows of words with a picture each."""

    ids, patches, sizes = pictures(8)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        last = int(self.sizes[: index + 1].sum())
        size = self.sizes[index]
        return {"ids": self.ids[index], "patches": self.patches[last - int(size) : last], "sizes": size}


def packed(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As collators of vision and language models: patches of all pictures one after another."""
    return {
        "ids": torch.stack([row["ids"] for row in rows]),
        "patches": torch.cat([row["patches"] for row in rows]),
        "sizes": torch.stack([row["sizes"] for row in rows]),
    }


def seen() -> Seen:
    torch.manual_seed(0)
    return Seen(layers=1).double()


def trainer_gathers_pictures(mesh: DeviceMesh) -> None:
    """Each rank brings pictures of other sizes, by which forward decides."""
    rows, plain, losses = Pictures(), seen(), []
    plan = Plan.uniform((2,), ("zero",))
    arguments = trainer(plan, FOLDER / "seen", save_strategy="no", lr_scheduler_type="constant").args
    arguments.gradient_accumulation_steps = 1
    one = Trainer(seen(), arguments, packed, rows, galvatron={"plan": plan, "batch": "gather"})
    one.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, weight_decay=0.0)
    halves = [packed([rows[at] for at in range(first, first + 4)]) for first in (0, 4)]
    for half in halves:
        loss = plain(**half)["loss"]
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(logged(one, "loss"), losses, rtol=1e-6, atol=0)  # Trainer logs in float32
    for name, parameter in one.model.named_parameters():
        same(parameter, plain.get_parameter(name))
    with torch.no_grad():
        same(one.predict(rows).predictions[-1], torch.cat([plain(**half)["hidden"] for half in halves]))


def trainer_computes_in_bfloat16(mesh: DeviceMesh) -> None:
    """Evaluated before it is trained, by another optimizer."""
    losses, _ = on_one_device()
    given = {"bf16": True, "max_steps": 1, "optim": "adafactor", "save_strategy": "no"}
    one = trainer(Plan.uniform((2,), ("zero",)), FOLDER / "half", **given)
    before = one.evaluate()["eval_loss"]
    one.train()
    assert one.model.plan.mixed_precision.param_dtype == torch.bfloat16
    assert abs(logged(one, "loss")[0] - losses[0]) < 0.02 and one.evaluate()["eval_loss"] != before


def accelerate_trains(mesh: DeviceMesh) -> None:
    """A loop of Accelerate's own making, saved and loaded in the middle."""
    _, plain = on_one_device()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which arguments of a Trainer that is refused have set
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, galvatron={"plan": STAGES})
    given = language_model()
    optimizer = torch.optim.AdamW(given.parameters(), lr=RATE, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    parts = accelerator.prepare(given, optimizer, DataLoader(Rows(), batch_size=2), rates)
    model, optimizer, loader, _ = parts
    assert isinstance(model, DistributedGraphModule) and accelerator.unwrap_model(model) is model
    for number, batch in enumerate(loader):
        step, part = divmod(number, ACCUMULATE)
        if part == 0:
            first = 4 * ACCUMULATE * step
            items = Rows()[first : first + 4 * ACCUMULATE]["labels"][:, 1:].ne(-100).sum()
        with accelerator.accumulate(model):
            accelerator.backward(ACCUMULATE * model(**batch, num_items_in_batch=items).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            rates.step() if accelerator.sync_gradients else None
            optimizer.zero_grad()
        if number == 3:
            accelerator.save_state(str(FOLDER / "state"))
            place = accelerator.save_state(str(FOLDER / "state"))  # in the place of the one before
            accelerator.wait_for_everyone()
            assert [one.name for one in (FOLDER / "state" / "galvatron_fx").glob("step-*")] == ["step-0000000001"]
            model.load_state_dict(language_model().state_dict())
            accelerator.load_state(place)
    for name, parameter in model.named_parameters():
        same(parameter, plain.get_parameter(name))
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    for name, value in state.items():
        same(value, plain.state_dict()[name])
    main = accelerator.is_main_process
    model.save_pretrained(FOLDER / "saved", state_dict=state, is_main_process=main)
    accelerator.wait_for_everyone()
    for name, value in LlamaForCausalLM.from_pretrained(FOLDER / "saved").state_dict().items():
        same(value, plain.state_dict()[name])
    refused(lambda: model.save_pretrained(FOLDER / "saved"), "save_pretrained")
    if not main:
        refused(lambda: model.save_pretrained(FOLDER / "saved", state_dict=state), "give is_main_process=")
    refused(lambda: accelerator.prepare(language_model()), "one model and a loader of its batches, together")
    refused(accelerator.load_state, "name the folder that save_state returned")
    refused(lambda: accelerator.register_save_state_pre_hook(print), "save what else is wanted")
    accelerator._options = {"plan": Plan.uniform((2,), ("data",))}
    without_loss = torch.nn.Linear(6, 3).double(), DataLoader(torch.ones(8, 6).double(), batch_size=2)
    refused(lambda: accelerator.prepare(*without_loss), "whose forward takes the targets and returns the loss")


def accelerate_refuses(mesh: DeviceMesh) -> None:
    """What splits the model otherwise, or gives processes unlike batches."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    refused(
        lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig()), "parallelism_config splits the model"
    )
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    refused(lambda: Accelerator(cpu=True, kwargs_handlers=[hook]), "comm_hook is of DistributedDataParallel")
    AcceleratorState._reset_state()  # the first Accelerator of a process says what is compiled
    refused(lambda: Accelerator(cpu=True, dynamo_backend="aot_eager"), "dynamo_backend AOT_EAGER")
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    refused(lambda: accelerator.prepare(DataLoader(torch.ones(6, 2), batch_size=2)), "even_batches=False gives some")
    refused(lambda: accelerator.join_uneven_inputs([], even_batches=False).__enter__(), "even_batches=False gives some")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        trainer_trains_and_resumes,
        trainer_refuses,
        trainer_takes_a_loss_of_outputs,
        trainer_takes_loss_and_outputs,
        accelerate_trains,
        accelerate_refuses,
        trainer_smooths_labels_of_padded_rows,
        trainer_gathers_pictures,
        trainer_computes_in_bfloat16,
    )
}

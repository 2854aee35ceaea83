"""Hugging Face ``Trainer``: the model is compiled for all processes when training or evaluation begins.

``from galvatron_fx.integrations.transformers import Trainer`` in the place of transformers', and
``Trainer(..., galvatron={"memory_budget": "12GiB"})``; for a subclass, ``class Mine(GalvatronMixin, Theirs)``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.integrations.accelerate import FOLDER, plain_optimizer
from galvatron_fx.integrations.even_lengths import even_lengths
from galvatron_fx.integrations.live_outputs import give_scalars_back, with_live_outputs
from galvatron_fx.integrations.preparing import (
    call_of,
    compiled_for_ranks,
    first_batch,
    policy_named,
    refuse_other_splits,
    require_all_processes,
    require_even_batches,
    save_again,
)
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.loss_inside import with_loss
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.weights import gather

__all__ = ["GalvatronMixin", "Trainer"]

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # of newer and of older versions
_TAKES_LOSS = (
    ". This trainer has a compute_loss of its own, which may make its loss of any output: where it takes the "
    "model's own (outputs.loss) and no other, say so by galvatron={'takes_loss': True, ...}"
)


class GalvatronMixin:
    """A Trainer whose model is compiled by ``galvatron``: options of :func:`galvatron_fx.compile`, such as ``plan``,
    ``memory_budget``, or a ``mesh`` other than one axis over all processes.

    Batches, accumulation, evaluation, saving and resuming are Trainer's. A loss is that of the rows of all processes,
    over the labels of all of them; label smoothing and ``compute_loss_func`` are compiled with the model. A
    ``compute_loss`` of the subclass's own gets outputs of the process's own rows, and the mean of the processes' losses
    counts; ``"takes_loss": True`` among the options says that it takes ``outputs.loss`` and no other: any plan can then
    be chosen.
    ``"pad_lengths": True`` among the options pads batches that processes have padded to lengths of their own
    (:func:`galvatron_fx.integrations.even_lengths.even_lengths`). A checkpoint holds a model that ``from_pretrained``
    reads, and states from which training goes on under any plan. Raises InputError for NEFTune, a ready optimizer and
    fp16.
    """

    def __init__(self, *args: Any, galvatron: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._options = dict(galvatron or {})
        self._pads = bool(self._options.pop("pad_lengths", False))
        self._takes_loss = bool(self._options.pop("takes_loss", False))
        super().__init__(*args, **kwargs)
        for name in _CHECKPOINTING:
            if getattr(self._trainer.args, name, False):
                setattr(self._trainer.args, name, False)  # or it were switched on in the compiled model
        self._trainer._set_signature_columns_if_needed()
        self._refuse_what_is_outside()

    @property
    def _trainer(self) -> Any:
        """This trainer, whose other bases are not known here."""
        return self

    def _refuse_what_is_outside(self) -> None:
        trainer = self._trainer
        names = ("fsdp", "deepspeed", "parallelism_config")
        refuse_other_splits([name for name in names if getattr(trainer.args, name, None)])
        if trainer.neftune_noise_alpha is not None:
            raise InputError("neftune_noise_alpha hooks a module, which a compiled model does not call: leave it out")
        if trainer.optimizer is not None:
            raise InputError(
                "optimizers= holds parameters of the model before it is compiled: give args.optim or "
                "optimizer_cls_and_kwargs=, which are built after it"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank's shards go to its device when it is compiled."""

    def _compile(self, loader: Any, rows: int) -> None:
        """Put the compiled model in the place of the one that was given."""
        trainer = self._trainer
        require_even_batches(loader)
        if isinstance(trainer.model, DistributedGraphModule):
            return
        require_all_processes(trainer.args.world_size, "on a host without GPUs, give TrainingArguments(use_cpu=True)")
        example = trainer._prepare_inputs(first_batch(loader, rows, self._options))
        count = trainer._get_num_items_in_batch([example], trainer.args.device)
        inputs_of = self._call_of_compute_loss if self._makes_loss else self._model_inputs
        example = inputs_of(example, count)
        options = policy_named(trainer.accelerator.mixed_precision, self._options)
        model = trainer.model
        if getattr(model, "is_gradient_checkpointing", False):
            _without_checkpointing(model)
        if self._has_own_loss:
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
            self._shifts = inner._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # as Trainer decides
            model = with_loss(model, self._own_loss)
        elif self._makes_loss:
            model = with_live_outputs(model)
        if trainer.args.torch_compile and trainer.args.torch_compile_backend == "inductor":
            options = {"backend": "inductor", **options}
        try:
            compiled = compiled_for_ranks(model, example, trainer.args.device.type, options, not self._makes_loss)
        except PlanError as error:
            raise PlanError(f"{error}{_TAKES_LOSS}" if self._makes_loss else str(error)) from error
        if self._makes_loss:
            give_scalars_back(compiled, self._share)
        elif not self._has_own_loss:
            compiled.register_forward_hook(self._say_whose_loss)
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = compiled
        # Accelerate would wrap it for data parallelism and mixed precision: a compiled model is prepared already.
        trainer.is_distributed_loading_by_transformers = True
        trainer.accelerator.prepare_model = lambda model, **_: model
        trainer.accelerator._models.append(compiled)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if not self._pads:
            return prepared
        trainer = self._trainer
        config = getattr(trainer.model, "config", None)
        return even_lengths(prepared, trainer.args.device, config, trainer._signature_columns)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._compile(train_dataloader, self._trainer._train_batch_size)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's, of the compiled model; InputError under a plan with stages for outputs beside the loss."""
        own = self._trainer.args
        self._compile(dataloader, own.per_device_eval_batch_size)
        wants_outputs = not (own.prediction_loss_only if prediction_loss_only is None else prediction_loss_only)
        if wants_outputs and self._trainer.model.plan.pipelining.num_stages > 1:
            raise InputError(
                f"{description.lower()} wants outputs beside the loss, which under a plan with stages the ranks of one "
                f"stage have: TrainingArguments(prediction_loss_only=True) takes the loss alone, or plan with "
                f"galvatron={{'num_stages': 1}}"
            )
        return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels of all processes, as the loss is that of all of them."""
        count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        trainer = self._trainer
        if count is None or trainer.args.average_tokens_across_devices or trainer.args.world_size == 1:
            return count
        return trainer.accelerator.gather(torch.as_tensor(count, device=device)).sum()

    @property
    def _makes_loss(self) -> bool:
        """Whether a class of this trainer's has a ``compute_loss`` of its own, which may take any of the outputs."""
        if self._takes_loss:
            return False
        known = (GalvatronMixin, transformers.Trainer)
        return any("compute_loss" in vars(kind) for kind in type(self).__mro__ if kind not in known)

    @property
    def _has_own_loss(self) -> bool:
        trainer = self._trainer
        has_loss = trainer.label_smoother is not None or trainer.compute_loss_func is not None
        return has_loss and not self._makes_loss

    def _call_of_compute_loss(self, inputs: Any, count: Any) -> Any:
        """What ``compute_loss`` calls the model with."""
        arguments = self._trainer.args
        if count is not None and not arguments.average_tokens_across_devices and arguments.world_size > 1:
            raise InputError(
                "average_tokens_across_devices=False, and a compute_loss that may make its loss of outputs: leave it "
                "at True, as num_items_in_batch is that of all processes"
            )
        model = self._trainer.model.train()
        called = call_of(model, lambda: self.compute_loss(model, dict(inputs), num_items_in_batch=count))
        if called is None:
            raise InputError("compute_loss does not call the model that it is given, which is what is compiled")
        return called

    def _share(self, arguments: Mapping[str, Any]) -> float:
        """What part of a loss of all rows is a rank's: over the labels of all ranks, losses are added up over them."""
        trainer = self._trainer
        is_sum = trainer.args.average_tokens_across_devices and arguments.get("num_items_in_batch") is not None
        return 1 / trainer.accelerator.num_processes if is_sum else 1.0

    def _own_loss(self, outputs: Any, targets: tuple[Any, Any]) -> Any:
        """The loss that Trainer computes from outputs of the model; part of what is compiled."""
        trainer = self._trainer
        labels, count = targets
        if trainer.compute_loss_func is not None:
            return trainer.compute_loss_func(outputs, labels, num_items_in_batch=count)
        return trainer.label_smoother(outputs, labels, shift_labels=self._shifts, num_items_in_batch=count)

    def _model_inputs(self, inputs: Any, count: Any) -> dict[str, Any]:
        """What the model is called with: the batch, and the number of its labels where the loss takes that."""
        given = dict(inputs)
        if self._trainer.model_accepts_loss_kwargs and count is not None:
            given["num_items_in_batch"] = count
        if self._has_own_loss and "labels" in given:
            given["labels"] = given["labels"], count
        return given

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As Trainer's; a loss that the model computes is that of all processes, and not multiplied by their number."""
        trainer = self._trainer
        if self._makes_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if self._has_own_loss:
            loss, outputs = model(**self._model_inputs(inputs, num_items_in_batch))
            return (loss, outputs) if return_outputs else loss
        averages = trainer.args.average_tokens_across_devices
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            trainer.args.average_tokens_across_devices = averages

    def _say_whose_loss(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """Have a loss that the model has just computed not multiplied by the number of ranks: it is that of all."""
        if not isinstance(outputs, Mapping) or outputs.get("loss") is not None:
            self._trainer.args.average_tokens_across_devices = False

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm: Tensor = self._trainer.model.clip_grad_norm_(self._trainer.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._trainer.model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the whole model from one process, as ``save_pretrained`` does."""
        trainer = self._trainer
        compiled = trainer.model
        if not isinstance(compiled, DistributedGraphModule):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        whole = gather(compiled, rank=0)
        if whole is not None:
            trainer.model = whole
            try:
                super()._save(output_dir)  # type: ignore[misc]
            finally:
                trainer.model = compiled

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer = self._trainer
        save_again(
            os.path.join(output_dir, FOLDER),
            model=trainer.model,
            optimizer=plain_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer = self._trainer
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, FOLDER)
        if not os.path.isdir(folder):
            raise InputError(f"{checkpoint} has no folder {FOLDER}, in which a compiled model's training is saved")
        Checkpointer(folder).load(
            model=trainer.model, optimizer=plain_optimizer(trainer.optimizer), scheduler=trainer.lr_scheduler
        )


def _without_checkpointing(model: Any) -> None:
    """Switch off what layers compute again by themselves: the plan chooses that."""
    disable = next(name for name in _CHECKPOINTING if hasattr(model, f"{name}_disable"))
    getattr(model, f"{disable}_disable")()


class Trainer(GalvatronMixin, transformers.Trainer):
    """``transformers.Trainer`` with the argument ``galvatron``: see :class:`GalvatronMixin`."""

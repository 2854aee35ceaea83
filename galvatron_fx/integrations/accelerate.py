"""Hugging Face Accelerate: an ``Accelerator`` that compiles the model that it prepares.

``from galvatron_fx.integrations.accelerate import Accelerator`` in the place of accelerate's, and
``Accelerator(galvatron={"memory_budget": "12GiB"})``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.integrations.preparing import (
    compiled_for_ranks,
    first_batch,
    follow,
    policy_named,
    refuse_other_splits,
    refuse_uneven_batches,
    require_all_processes,
    require_even_batches,
    save_again,
)
from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.weights import gather

__all__ = ["FOLDER", "Accelerator", "plain_optimizer"]

FOLDER = "galvatron_fx"
# Arguments that have accelerate split the model, and what "accelerate launch" sets for them.
_SPLITS = {
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "ACCELERATE_USE_TP",
}


class Accelerator(accelerate.Accelerator):
    """Accelerate's, with a model that :func:`galvatron_fx.compile` has made for all its processes.

    ``galvatron``: options of ``compile``, such as ``plan`` or ``memory_budget``, and a ``mesh`` other than one axis
    over all processes. ``prepare(model, optimizer, loader)`` traces the model on a batch of the loader; optimizers
    that were built over the model follow. A loss is that of the rows of all processes. Raises InputError for plugins
    that split the model, hooks of DistributedDataParallel's communication, and compilers other than inductor.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, galvatron: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        given = signature(accelerate.Accelerator).bind_partial(*args, **kwargs).arguments
        launched = (name for name, variable in _SPLITS.items() if os.environ.get(variable, "").lower() == "true")
        refuse_other_splits([*(name for name in _SPLITS if given.get(name) is not None), *launched])
        super().__init__(*args, **kwargs)
        self._options = {**self._compiler(), **(galvatron or {})}
        if getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO) != DDPCommunicationHookType.NO:
            raise InputError(
                "comm_hook is of DistributedDataParallel, which does not wrap the model: leave it out, and send "
                "gradients in bfloat16 by galvatron={'mixed_precision': MixedPrecisionPolicy(reduce_dtype=bfloat16)}"
            )

    def _compiler(self) -> dict[str, Any]:
        """The option of ``compile`` for what ``dynamo_backend`` asks."""
        backend = self.state.dynamo_plugin.backend
        if backend not in (DynamoBackend.NO, DynamoBackend.INDUCTOR):
            raise InputError(f"dynamo_backend {backend.value}: what is compiled here runs eagerly or by inductor")
        return {"backend": "inductor"} if backend == DynamoBackend.INDUCTOR else {}

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in the order that they are given in.

        Raises InputError for several models, for a model without a loader, and what ``compile`` raises.
        """
        plain = [one for one in args if isinstance(one, nn.Module) and not isinstance(one, DistributedGraphModule)]
        if plain:
            compiled = self._compiled(plain, [one for one in args if isinstance(one, DataLoader)])
            for optimizer in (one for one in args if isinstance(one, Optimizer)):
                follow(plain_optimizer(optimizer), plain[0], compiled)
            args = tuple(compiled if one is plain[0] else one for one in args)
        return super().prepare(*args, device_placement=device_placement)

    def _compiled(self, models: list[nn.Module], loaders: list[Any]) -> DistributedGraphModule:
        if len(models) > 1 or not loaders:
            self._refuse_alone()
        require_all_processes(self.num_processes, "on a host without GPUs, build Accelerator(cpu=True, ...)")
        loader = self.prepare_data_loader(loaders[0])
        total = getattr(loader, "total_batch_size", None)
        example = first_batch(loader, total // self.num_processes if total else None, self._options)
        options = policy_named(self.mixed_precision, self._options)
        return compiled_for_ranks(models[0], example, self.device.type, options)

    def _refuse_alone(self) -> NoReturn:
        raise InputError(
            "prepare takes one model and a loader of its batches, together: accelerator.prepare(model, optimizer, "
            "loader); of a model that is not trained, accelerator.prepare_model(model, evaluation_mode=True)"
        )

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Take a compiled model as it is."""
        if isinstance(model, DistributedGraphModule):
            self._models.append(model)
            return model
        if not (args[1] if len(args) > 1 else kwargs.get("evaluation_mode")):
            self._refuse_alone()
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's. Raises InputError where some processes would get fewer batches than others."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        require_even_batches(prepared)
        return prepared

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: all processes get as many batches. Raises InputError where they are not to be even."""
        if even_batches is False:
            refuse_uneven_batches()
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """As accelerate's; over the parameters of all stages where they are those of a compiled model."""
        given = list(parameters)
        for model in self._models:
            if isinstance(model, DistributedGraphModule) and set(map(id, given)) == set(map(id, model.parameters())):
                return model.clip_grad_norm_(max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
        return norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict of a compiled model on the main process, an empty one on the others."""
        if not isinstance(model, DistributedGraphModule):
            return super().get_state_dict(model, unwrap)
        whole = gather(model, rank=0)
        return {} if whole is None else whole.state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As accelerate's, with a checkpoint of model and optimizer that can be loaded under another plan.

        Saved into the same folder again, it takes the place of the one before when it is whole.
        """
        with self._without_model() as (model, optimizer):
            place: str = super().save_state(output_dir, *args, **kwargs)
        save_again(os.path.join(place, FOLDER), model=model, optimizer=optimizer)
        return place

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As accelerate's; without ``input_dir``, the newest of folders that are named automatically.

        Raises InputError where there is none, CheckpointError for a damaged checkpoint.
        """
        if input_dir is None:
            input_dir = self._newest()
        with self._without_model() as (model, optimizer):
            super().load_state(input_dir, *args, **kwargs)
        Checkpointer(os.path.join(input_dir, FOLDER)).load(model=model, optimizer=optimizer)

    def _newest(self) -> str:
        """The newest folder that accelerate has named."""
        folder = Path(self.project_dir or ".", "checkpoints")
        is_named = self.project_configuration.automatic_checkpoint_naming
        states = [*folder.glob("checkpoint_*")] if is_named else []
        if not states:
            raise InputError("load_state: name the folder that save_state returned")
        return str(max(states, key=lambda state: int(state.name.rpartition("_")[2])))

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse: such hooks save whole models."""
        raise InputError(
            "hooks of save_state and load_state get models and whole weights, and states here are saved in shards: "
            "after save_state, save what else is wanted, as by accelerator.get_state_dict(model)"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    @contextmanager
    def _without_model(self) -> Iterator[tuple[nn.Module, Optimizer | None]]:
        """The one model and its optimizer, of which accelerate is to save nothing."""
        if len(self._models) != 1 or len(self._optimizers) > 1:
            raise InputError(
                f"save_state and load_state take one model and at most one optimizer, and {len(self._models)} and "
                f"{len(self._optimizers)} are prepared"
            )
        held = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield held[0][0], plain_optimizer(held[1][0]) if held[1] else None
        finally:
            self._models, self._optimizers = held


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside of accelerate's wrapper."""
    inner: Optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return inner

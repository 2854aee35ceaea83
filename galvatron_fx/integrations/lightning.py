"""Lightning: a strategy that compiles the model inside of a LightningModule.

``Trainer(strategy=GalvatronStrategy("model", galvatron={"memory_budget": "12GiB"}))`` for a LightningModule whose
``training_step`` calls ``self.model(...)`` and takes the loss from what it returns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.integrations.preparing import call_of, compiled_for_ranks, first_batch, policy_named
from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.weights import gather

__all__ = ["GalvatronStrategy"]

_POLICIES = {"32-true": "no", "64-true": "no", "bf16-true": "no", "bf16-mixed": "bf16"}


class GalvatronStrategy(DDPStrategy):
    """Processes and loaders as under DDP; the module called ``module`` is compiled for all of them before a fit.

    ``galvatron``: options of :func:`galvatron_fx.compile`. ``module`` is traced on what ``training_step`` calls it
    with, for a batch of the train loader, and returns the loss: that of the rows of all processes. A checkpoint holds
    whole weights, as without a strategy; the folder beside it, of its name and ``.galvatron_fx``, holds states from
    which training goes on under any plan.

    Raises InputError where ``training_step`` does not call the module, and for parameters that are trained outside of
    it.
    """

    def __init__(self, module: str = "model", *, galvatron: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._name = module
        self._options = dict(galvatron or {})
        self._loaded_from = ""

    @property
    def _module(self) -> Any:
        """The module that is compiled, or to be."""
        return self._owner._modules[self._leaf]

    @property
    def _owner(self) -> nn.Module:
        owner: nn.Module = self.lightning_module.get_submodule(self._name.rpartition(".")[0])
        if self._leaf not in owner._modules:
            raise InputError(f"the LightningModule has no module '{self._name}': name the one that training_step calls")
        return owner

    @property
    def _leaf(self) -> str:
        return self._name.rpartition(".")[2]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into the compiled module."""
        return True

    def setup(self, trainer: Any) -> None:
        """As under DDP; to validate, test and predict, a module that is compiled is taken as it is."""
        is_ready = trainer.state.fn != TrainerFn.FITTING and isinstance(self._module, DistributedGraphModule)
        with self._without_module() if is_ready else nullcontext():
            super().setup(trainer)

    def configure_ddp(self) -> None:
        """Compile the module, in the place of wrapping the LightningModule."""
        if isinstance(self._module, DistributedGraphModule):
            return
        if any(isinstance(one, WeightAveraging) for one in self.lightning_module.trainer.callbacks):
            raise InputError(
                "WeightAveraging copies the module before it is compiled: average in on_train_batch_end, by "
                "torch.optim.swa_utils.AveragedModel of the compiled module"
            )
        inside = set(map(id, self._module.parameters()))
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise InputError(
                    f"'{name}' is trained outside of '{self._name}', the module that is compiled: move it inside"
                )
        precision = str(self.precision_plugin.precision)
        options = policy_named(_POLICIES.get(precision, precision), self._options)
        compiled = compiled_for_ranks(self._module, self._example(), self.root_device.type, options)
        self._owner._modules[self._leaf] = compiled
        self.precision_plugin.clip_grad_by_norm = lambda _, value: compiled.clip_grad_norm_(value)

    def _example(self) -> Any:
        """What ``training_step`` calls the module with, for a batch of the loader."""
        trainer, module = self.lightning_module.trainer, self.lightning_module
        trainer.fit_loop.setup_data()
        loader = trainer.train_dataloader
        batch = first_batch(loader, getattr(loader, "batch_size", None), self._options)

        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)  # as Lightning does
        example = call_of(self._module, lambda: module.training_step(batch, *(0,) * takes_index))
        if example is not None:
            return example
        raise InputError(f"training_step does not call self.{self._name}: name the module that it calls")

    def model_to_device(self) -> None:
        """Send all but the module, whose shards go to their devices when it is compiled."""
        with self._without_module():
            super().model_to_device()

    def teardown(self) -> None:
        """As under DDP; the compiled module stays where it is."""
        with self._without_module():
            super().teardown()

    @contextmanager
    def _without_module(self) -> Iterator[None]:
        owner, leaf = self._owner, self._leaf
        module, owner._modules[leaf] = owner._modules[leaf], None
        try:
            yield
        finally:
            owner._modules[leaf] = module

    # ---- checkpoints ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict, on rank 0; without the module's on the others."""
        if not isinstance(self._module, DistributedGraphModule):
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        whole = gather(self._module, rank=0)
        with self._without_module():
            rest: dict[str, Tensor] = self.lightning_module.state_dict()
        inside = {} if whole is None else {f"{self._name}.{name}": value for name, value in whole.state_dict().items()}
        return {**rest, **inside}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the states lie in the folder beside the file."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the file, and the folder beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.remove_checkpoint(filepath, only_folder=True)
        self.barrier()
        trainer = self.lightning_module.trainer
        Checkpointer(_folder(filepath)).save(trainer.global_step, model=self._module, optimizer=self._optimizer())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the file; its optimizer states come from the folder."""
        self._loaded_from = _folder(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load model and optimizer from the folder beside the file that was loaded."""
        Checkpointer(self._loaded_from).load(model=self._module, optimizer=self._optimizer())

    def remove_checkpoint(self, filepath: Any, only_folder: bool = False) -> None:
        """Remove the file and the folder beside it."""
        if not only_folder:
            super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def _optimizer(self) -> Any:
        if len(self.optimizers) != 1:
            raise InputError(f"a checkpoint holds one optimizer, and configure_optimizers made {len(self.optimizers)}")
        return self.optimizers[0]


def _folder(filepath: Any) -> str:
    return f"{os.fspath(filepath)}.galvatron_fx"

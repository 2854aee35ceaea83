"""What the integrations share: a first batch, a model compiled for loaders of ranks, optimizers that follow it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from galvatron_fx.api import compile
from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensors import whole_tensor
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.batch_rows import unmarked
from galvatron_fx.runtime.module import DistributedGraphModule
from passes.frontend.capture.capture import FlatInputs

__all__ = [
    "call_of",
    "compiled_for_ranks",
    "first_batch",
    "follow",
    "policy_named",
    "refuse_other_splits",
    "refuse_uneven_batches",
    "require_all_processes",
    "require_even_batches",
    "save_again",
]


def compiled_for_ranks(
    model: nn.Module, example: Any, device_type: str, options: Mapping[str, Any], needs_loss: bool = True
) -> DistributedGraphModule:
    """Compile ``model`` for batches of which every rank brings its own rows, as loaders of these tools give them.

    ``example``: such rows; ``options``: of :func:`galvatron_fx.compile`, ``mesh`` included, of which ``batch`` may be
    "gather". Without gradient mode the outputs with a batch are those of the rank's own rows, too. Raises InputError
    for a model that returns no loss, where one is needed, as it is for "gather".
    """
    given = {"batch": "local", **options}
    if given["batch"] == "global" or "example_inputs" in given:
        raise InputError(
            "example_inputs= and the global batch are what the loader says: leave them out of galvatron={...}"
        )
    if given["batch"] == "gather" and not needs_loss:
        raise InputError(
            "batch='gather' and a compute_loss that may make its loss of outputs, which are of the rows of all "
            "processes: where it takes outputs.loss alone, say so by galvatron={'takes_loss': True, ...}"
        )
    mesh = given.pop("mesh", None) or init_device_mesh(device_type, (dist.get_world_size(),))
    compiled = compile(model, mesh, example, **given)
    if needs_loss and not compiled.has_loss:
        raise InputError(
            "the model returns no loss, and one that is computed outside would be that of this rank's rows alone: "
            "give a module whose forward takes the targets and returns the loss, as galvatron_fx.with_loss(model, loss)"
        )
    compiled.register_forward_hook(_own_outputs, with_kwargs=True)
    return compiled


def require_all_processes(counted: int, remedy: str) -> None:
    """Raise InputError where a tool has ``counted`` other processes than the group has, as on a host without GPUs: its
    loaders would give several of them the same rows, and its losses and steps would be those of one.
    """
    if dist.is_initialized() and dist.get_world_size() != counted:
        raise InputError(
            f"the process group has {dist.get_world_size()} processes, and Accelerate counts {counted}, whose "
            f"loaders would give several of them the same rows: {remedy}"
        )


def _own_outputs(model: DistributedGraphModule, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Outputs of this rank's rows in the place of those of all ranks."""
    if torch.is_grad_enabled():
        return outputs
    rows = model.rows_of_call(args, kwargs)

    def own(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(rows) * dist.get_world_size()
        if not rows or not has_rows:
            return leaf
        return whole_tensor(leaf).narrow(0, rows[0], len(rows))

    return pytree.tree_map(own, outputs)


def call_of(module: nn.Module, run: Callable[[], Any]) -> FlatInputs | None:
    """What ``run`` calls ``module`` with at first, where it stops; None where it does not call it.

    Random number generators are left as they were.
    """

    def catch(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _CalledError(args, kwargs)

    handle = module.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with _random_states_kept():
            run()
    except _CalledError as called:
        return unmarked(*called.args)[0]
    finally:
        handle.remove()
    return None


class _CalledError(Exception):
    """The module was called: with the arguments of this."""


def first_batch(loader: Any, rows: int | None, options: Mapping[str, Any]) -> Any:
    """A batch such as ``loader`` gives, of ``rows`` samples (None: as many as it gives).

    ``options``: of ``compile``; where batches of ranks may be unlike, each takes other samples, as when it trains.

    Random number generators are left as they were.
    """
    with _random_states_kept():
        dataset = loader.dataset
        if rows is None:
            return next(iter(loader))
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            start = rows * dist.get_rank() if options.get("batch") == "gather" else 0
            return loader.collate_fn([dataset[index % len(dataset)] for index in range(start, start + rows)])
        return loader.collate_fn(list(islice(iter(dataset), rows)))


@contextmanager
def _random_states_kept() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def policy_named(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with the mixed precision that a tool calls so: "no" or "bf16". Raises InputError for others."""
    if name == "no" or "mixed_precision" in options:
        return dict(options)
    if name != "bf16":
        raise InputError(f"mixed precision {name!r} is not computed: use bf16, or galvatron={{'mixed_precision': ...}}")
    return {**options, "mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def refuse_other_splits(names: Sequence[str]) -> None:
    """Raise InputError where a tool is asked, by arguments of these ``names``, to split the model, too."""
    for name in names:
        raise InputError(
            f"{name} splits the model in a way of its own, and the plan has split it already: leave it out of "
            f"the arguments (role 'zero' is what FSDP and ZeRO do)"
        )


def require_even_batches(loader: Any) -> None:
    """Raise InputError where a ``loader`` that accelerate has split among processes gives some of them fewer batches,
    or smaller ones.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if getattr(sampler, "even_batches", True) or getattr(sampler, "drop_last", False):
        return
    if loader.total_dataset_length % loader.total_batch_size:
        refuse_uneven_batches()


def refuse_uneven_batches() -> NoReturn:
    """Raise InputError for processes with unlike batches."""
    raise InputError(
        "even_batches=False gives some processes fewer rows, and all make each step together: leave it at True, which "
        "fills the last batches up with the first rows, or give the loader drop_last=True"
    )


def follow(optimizer: Optimizer, plain: nn.Module, compiled: DistributedGraphModule) -> None:
    """Have an optimizer that was built over ``plain`` train the ``compiled`` model; under stages, what this rank holds.

    Raises InputError where it holds other parameters, or states.
    """
    if optimizer.state:
        raise InputError(f"this {type(optimizer).__name__} has made steps: build it anew before prepare")
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    held = dict(compiled.named_parameters())
    for group in optimizer.param_groups:
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise InputError(
                f"this {type(optimizer).__name__} holds a parameter of shape {tuple(unknown[0].shape)} that is not one "
                f"of the model's: build it over the parameters of the model that is prepared with it"
            )
        known = (names[id(parameter)] for parameter in group["params"])
        group["params"] = [held[name] for name in known if name in held]


def save_again(folder: str, **training: Any) -> None:
    """Save ``training`` (what :meth:`Checkpointer.save` takes) in the place of what is in ``folder``, if anything is.

    The one before goes when the new one is whole. Raises CheckpointError as that.
    """
    checkpoints = Checkpointer(folder)
    latest = checkpoints.latest()
    checkpoints.save(0 if latest is None else latest + 1, **training)
    if latest is not None and dist.get_rank() == 0:
        shutil.rmtree(Steps(Path(folder)).path(latest))

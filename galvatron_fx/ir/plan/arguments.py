"""What arguments of the public functions must be, by name: said before anything runs, in the words of the caller.

Torch is imported where something of torch is asked for: plans are read without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from galvatron_fx.ir.errors import GalvatronError, InputError, PlanError
from galvatron_fx.ir.plan.pipelining import VOCABULARIES
from galvatron_fx.ir.plan.strategy import OFFLOADABLE, ROLES, Strategy

__all__ = ["check_arguments", "shown"]

_MOST_SHOWN = 60


@dataclass(frozen=True)
class _Argument:
    """What an argument may be, and what to give where it is not."""

    accepts: Callable[[Any], bool]
    remedy: str
    error: type[GalvatronError] = InputError


def check_arguments(**arguments: Any) -> None:
    """Compare arguments with what those of their names must be.

    Raises InputError, or PlanError for what belongs to a plan, that names the argument, its value and the remedy.
    """
    for name, value in arguments.items():
        expected = _ARGUMENTS[name]
        if not expected.accepts(value):
            raise expected.error(f"{name} is {shown(value)}: {expected.remedy}")


def shown(value: Any) -> str:
    """``value`` in a few words: small plain values as they are, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, (list, tuple, dict, set)) else ""
    return f"{text}, {kind}" if 0 < len(text) <= _MOST_SHOWN else kind


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule)


def _is_mesh(value: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)


def _count(least: int) -> Callable[[Any], bool]:
    return lambda value: value is None or (_is_int(value) and value >= least)


def _is_callable(value: Any) -> bool:
    return value is None or (callable(value) and not isinstance(value, type))


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and bool(value))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _has_state(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return value is None or (not isinstance(value, type) and all(map(callable, methods)))


def _is_batch_dim(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) and _is_int(dim) for name, dim in value.items())
    return value is None or _is_int(value)


def _is_constraints(value: Any) -> bool:
    if value is None:
        return True
    return _has_names(value) and all(
        isinstance(wanted, (str, Strategy)) or _is_sequence(wanted) or _has_names(wanted) for wanted in value.values()
    )


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_EXAMPLE_ROLES = "give a sequence of roles, such as ('data', 'zero'); there are " + ", ".join(ROLES)
_STATE = _Argument(_has_state, "give an object with state_dict() and load_state_dict(), or None")
_FOLDER = _Argument(_is_path, "give the path of a folder")
_STAGES = _Argument(_count(1), "give an int from 1, or None to search it", PlanError)

_ARGUMENTS: dict[str, _Argument] = {
    "model": _Argument(_is_module, "give an nn.Module with ordinary Python code, as MyModel(...)"),
    "mesh": _Argument(
        _is_mesh,
        "give a DeviceMesh, such as init_device_mesh('cpu', (world_size,)) of torch.distributed.device_mesh",
    ),
    "axis_sizes": _Argument(_is_sequence, "give the number of ranks along each mesh axis, such as (2, 4)", PlanError),
    "strategies": _Argument(
        lambda value: _is_sequence(value) and all(isinstance(one, Strategy) for one in value),
        "give one Strategy per block, such as [Strategy(('data',))] * 4",
        PlanError,
    ),
    "batch": _Argument(_count(1), "give a number of samples from 1, or None for that of the example inputs"),
    "sequence": _Argument(_count(1), "give a number of tokens from 1, or None for that of the example inputs"),
    "batch_dim": _Argument(
        _is_batch_dim, "give the dim that is the batch in all inputs, a dict of those of some inputs by name, or None"
    ),
    "forward_only": _Argument(
        lambda value: value is None or isinstance(value, bool),
        "give True, False, or None for what the model's mode and torch.no_grad() say",
    ),
    "num_blocks": _Argument(_count(1), "give an int from 1, or None for any number of blocks", PlanError),
    "roles": _Argument(_is_sequence, _EXAMPLE_ROLES, PlanError),
    "recompute": _Argument(
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value in ("auto", "selective")),
        "use 'auto', 'selective', True or False",
    ),
    "offload": _Argument(
        lambda value: _is_sequence(value) and all(each in OFFLOADABLE for each in value),
        "give ('activations',) to let them wait on the host, ('states',) to keep those of optimizers there, "
        "('parameters',) to keep parameters there with their states, several of them, or () for nothing",
    ),
    "storage": _Argument(lambda value: value is None or _is_path(value), "give the path of a folder, or None"),
    "fold_gradients": _Argument(lambda value: isinstance(value, bool), "give True or False"),
    "constraints": _Argument(
        _is_constraints,
        "give a dict from modules to Strategy, roles or roles by mesh axis, or from mesh axes to a role; or None",
        PlanError,
    ),
    "num_stages": _STAGES,
    "num_microbatches": _STAGES,
    "schedule": _Argument(lambda value: value is None or isinstance(value, str), "give its name, or None", PlanError),
    "vocabulary": _Argument(
        lambda value: value is None or (isinstance(value, str) and value in VOCABULARIES),
        f"use {' or '.join(map(repr, VOCABULARIES))}, or None to search it",
        PlanError,
    ),
    "seconds": _Argument(
        lambda value: _is_number(value) and value > 0,
        "give seconds above 0",
    ),
    "search_seconds": _Argument(
        lambda value: value is None or (_is_number(value) and value > 0),
        "give seconds above 0, or None for no limit",
    ),
    "expert_imbalance": _Argument(
        lambda value: _is_number(value) and 1 <= value < inf,
        "give how many times the mean the busiest rank's experts have, a number from 1, such as 1.25",
    ),
    "tune_seconds": _Argument(
        lambda value: value is None or (_is_number(value) and value > 0),
        "give seconds above 0, or None to run nothing before training",
    ),
    "seed": _Argument(
        lambda value: _is_int(value) and -(2**63) <= value < 2**64, "give an int, the same on every rank"
    ),
    "progress": _Argument(_is_callable, "give a function of one argument, which is told of each moment, or None"),
    "on_pass": _Argument(_is_callable, "give a function of a pass's name and its graph, or None"),
    "inputs_of": _Argument(
        lambda value: value is not None and _is_callable(value),
        "give a function from a number of samples to the example inputs of that batch",
    ),
    "batches": _Argument(
        lambda value: value is None or _is_sequence(value), "give numbers of samples from 1, or None to search them"
    ),
    "after": _Argument(lambda value: value is None or isinstance(value, str), "give the name of a pass, or None"),
    "folder": _FOLDER,
    "dump_folder": _Argument(lambda value: value is None or _is_path(value), "give the path of a folder, or None"),
    "like": _Argument(lambda value: value is None or _is_path(value), "give the path of a folder, or None"),
    "path": _Argument(_is_path, "give the path of a file"),
    "cast": _Argument(lambda value: isinstance(value, bool), "give True or False"),
    "keep": _Argument(_count(1), "count checkpoints from 1, or give None to keep all"),
    "every": _Argument(_count(1), "count steps from 1, or give None to keep no more than the last"),
    "saved_step": _Argument(lambda value: _is_int(value) and value >= 0, "steps count from 0"),
    "step": _Argument(_count(0), "steps count from 0; None takes the last"),
    "simulate_runners_up": _Argument(lambda value: isinstance(value, bool), "give True or False"),
    "asynchronous": _Argument(lambda value: isinstance(value, bool), "give True or False"),
    "optimizer": _STATE,
    "scheduler": _STATE,
    "loader": _STATE,
    "extra": _Argument(lambda value: value is None or isinstance(value, Mapping), "give a dict of plain values"),
    "max_norm": _Argument(lambda value: _is_number(value) or hasattr(value, "item"), "give a number"),
    "norm_type": _Argument(_is_number, "give a number, such as 2.0"),
}

"""What loading replaces, kept until all of it is replaced on every rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from galvatron_fx.checkpoint import generators
from galvatron_fx.checkpoint.training import HasState, Training
from galvatron_fx.ir.errors import CheckpointError
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.module import DistributedGraphModule


@dataclass
class Undo:
    """The state of ``training`` as it was: ``tensors`` of the model with copies of them, and all else."""

    training: Training
    tensors: list[tuple[Tensor, Tensor]]
    optimizer: dict[str, Any] | None
    others: list[tuple[str, HasState, dict[str, Any] | Exception]]
    dropout: Tensor | None
    generators: dict[str, Any]

    @classmethod
    def of(cls, training: Training, tensors: Iterable[Tensor]) -> Undo:
        """Copy ``tensors`` to the CPU, and the states of everything else."""
        optimizer, model = training.optimizer, training.model
        random = generators.states()  # first, since a loader may draw to say where it is
        given = (("scheduler", training.scheduler), ("loader", training.loader))
        parts = [local_part(tensor).detach() for tensor in tensors]
        return cls(
            training,
            [(part, part.to("cpu", copy=True)) for part in parts],
            # Loading replaces these dicts and lists; what they hold stays as it is.
            None if optimizer is None else {"state": optimizer.state, "param_groups": optimizer.param_groups},
            [(name, thing, _state_of(thing)) for name, thing in given if thing is not None],
            model.dropout_generator.get_state() if isinstance(model, DistributedGraphModule) else None,
            random,
        )

    @contextmanager
    def unless_done(self) -> Iterator[None]:
        """Put everything back where the body raises."""
        try:
            yield
        except BaseException as error:
            self._put_back(error)
            raise

    def _put_back(self, cause: BaseException) -> None:
        for part, before in self.tensors:
            part.copy_(before)
        if self.training.optimizer is not None and self.optimizer is not None:
            self.training.optimizer.__setstate__(self.optimizer)
        reasons = ((name, _refusal(thing, state)) for name, thing, state in self.others)
        stuck = [f"the {name} ({type(why).__name__}: {why})" for name, why in reasons if why is not None]
        if self.dropout is not None and isinstance(self.training.model, DistributedGraphModule):
            self.training.model.dropout_generator.set_state(self.dropout)
        generators.restore(self.generators)
        if stuck:
            raise CheckpointError(
                f"loading failed ({cause}), and {' and '.join(stuck)} would not take back its state from before: make "
                f"it anew; all else is as it was"
            ) from cause


def _state_of(thing: HasState) -> dict[str, Any] | Exception:
    """The state of a scheduler or loader, or why it cannot say: some cannot before they have begun."""
    try:
        return copy.deepcopy(thing.state_dict())
    except Exception as error:
        return error


def _refusal(thing: HasState, state: dict[str, Any] | Exception) -> Exception | None:
    """Why a scheduler or loader, whatever it is, does not take back its own state; None where it does."""
    if isinstance(state, Exception):
        return state
    try:
        thing.load_state_dict(state)
    except Exception as error:
        return error
    return None

"""The state of a run that is no tensor: what the ranks that train say of it, and what those that join take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from galvatron_fx.checkpoint import generators, model_state, optimizer_state
from galvatron_fx.checkpoint.model_state import Shapes
from galvatron_fx.checkpoint.training import HasState, Training
from galvatron_fx.ir.errors import InputError
from galvatron_fx.replanning.redistribution import Chunk, Held
from galvatron_fx.runtime.module import DistributedGraphModule

__all__ = ["RankState", "RunState", "tensors_of"]


def tensors_of(model: DistributedGraphModule) -> dict[str, Tensor]:
    """Parameters and all buffers that this rank holds; a tied one once."""
    return {**{name: p.detach() for name, p in model.named_parameters()}, **dict(model.named_buffers())}


@dataclass(frozen=True)
class RankState:
    """What a rank that trains says: its parts of ``tensors``, the record of its ``optimizer``, which parameters are
    ``trained`` and which modules ``train``, and the states of all that has some.
    """

    tensors: dict[str, Held]
    shapes: Shapes
    optimizer: dict[str, Any] | None
    trained: dict[str, bool]
    train: dict[str, bool]
    folds: bool
    dropout: Tensor
    generators: dict[str, Any]
    scheduler: Any
    loader: Any

    @classmethod
    def take(cls, training: Training, model: DistributedGraphModule) -> tuple[RankState, dict[str, Tensor]]:
        """That of this rank, and the tensors themselves."""
        tensors, record = tensors_of(model), None
        if training.optimizer is not None:
            states, record = optimizer_state.take(model, training.optimizer, model.stage_copies)
            tensors |= states
        state = cls(
            {name: Held(Chunk.of(tensor), tensor.dtype) for name, tensor in tensors.items()},
            {name: model_state.shape_of(tensor) for name, tensor in tensors.items()},
            record,
            {name: parameter.requires_grad for name, parameter in model.named_parameters()},
            {name: module.training for name, module in model._tree.twin.named_modules()},
            model._folded is not None,
            model.dropout_generator.get_state(),
            generators.states(),
            _state_of(training.scheduler),
            _state_of(training.loader),
        )
        return state, tensors


@dataclass(frozen=True)
class RunState:
    """What all ranks together say; ``first``: the first of those that train; ``joins``: whether this rank does not
    train yet, and is to.
    """

    held: Sequence[Mapping[str, Held]]
    shapes: Shapes
    optimizer: dict[str, Any] | None
    trained: Mapping[str, bool]
    first: RankState
    joins: bool

    @classmethod
    def of(cls, states: Sequence[RankState | None], joining: Sequence[int], rank: int) -> RunState:
        """Put them together; ``states``: of all ranks of the job, None where one does not train; ``joining``: those
        that are to. Raises CheckpointError for optimizers that differ, InputError for loaders that none can take over.
        """
        known = [state for state in states if state is not None]
        first = known[0]
        optimizer = None
        if first.optimizer is not None:
            optimizer = optimizer_state.merge([state.optimizer for state in known if state.optimizer is not None])
        if joining and any(state.loader != first.loader for state in known):
            raise InputError(
                f"the loaders of the ranks are at unlike positions, and ranks {list(joining)}, which join, cannot take "
                f"them over: give every rank the same global batch, or leave out loader="
            )
        return cls(
            [state.tensors if state is not None else {} for state in states],
            {name: shape for state in known for name, shape in state.shapes.items()},
            optimizer,
            {name: flag for state in known for name, flag in state.trained.items()},
            first,
            rank in joining,
        )

    def switch(self, model: nn.Module) -> None:
        """Have the modules of a copy of the original train, or evaluate, and its parameters be trained, as they are."""
        for name, module in model.named_modules():
            module.training = self.first.train[name]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained.get(name, parameter.requires_grad))

    def regroup(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the parameters of ``model`` into the groups of the optimizer in which those of their names were."""
        assert self.optimizer is not None
        parameters = dict(model.named_parameters())
        for group, recorded in zip(optimizer.param_groups, self.optimizer["groups"], strict=True):
            names = [name for name in parameters if name in set(recorded["parameters"])]
            group["params"] = [parameters[name] for name in names]
            if "param_names" in group:
                group["param_names"] = names

    def join(self, training: Training, model: DistributedGraphModule) -> None:
        """On a rank that joins: go on as the first of those that train would; generators last, as others may draw."""
        if training.scheduler is not None:
            training.scheduler.load_state_dict(self.first.scheduler)
        if training.loader is not None:
            training.loader.load_state_dict(self.first.loader)
        model.dropout_generator.set_state(self.first.dropout)
        generators.restore(self.first.generators)


def _state_of(thing: HasState | None) -> Any:
    return None if thing is None else thing.state_dict()

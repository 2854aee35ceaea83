"""Steps of training on the real ranks, to be timed and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan import optimizers
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.runtime.module import DistributedGraphModule
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["TimedSteps"]

_WARM_UP = 2
_TURN_S = 1.0
_FEWEST, _MOST = 3, 50  # steps of a turn

_OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    optimizers.ADAM: Adam,
    "adamw": AdamW,
    "sgd": SGD,
    "sgd_momentum": partial(SGD, momentum=0.9),
}
"""Those that update shards of whatever shape; of others steps are timed without the update."""


@dataclass(frozen=True)
class TimedSteps:
    """Times steps on ``inputs``, as this rank brings them; ``optimizer``: whose update is part of a step, where torch's
    own can update shards; ``has_loss``: whether the model returns what ``forward_backward`` differentiates.
    """

    ranks: Ranks
    inputs: FlatInputs
    optimizer: str
    has_loss: bool

    def __post_init__(self) -> None:
        tensors = zip(self.inputs.tensor_names, self.inputs.tensors, strict=True)
        empty = [name.strip("[]'") for name, tensor in tensors if tensor.device.type == "meta"]
        if empty:
            raise InputError(
                f"tune_seconds runs plans for real, and {', '.join(empty)} of example_inputs is on the meta device: "
                f"give a real batch, or leave out tune_seconds"
            )

    @property
    def updates(self) -> bool:
        """Whether the update is part of a step."""
        return self.optimizer in _OPTIMIZERS

    def run(self, module: DistributedGraphModule) -> float:
        """Train ``module`` for a turn; seconds of a step, of the slowest rank. Every rank calls it alike."""
        learns = not module.plan.forward_only
        trained = [parameter for parameter in module.parameters() if learns and parameter.requires_grad]
        optimizer = _OPTIMIZERS[self.optimizer](trained) if trained and self.updates else None
        module.fold_gradients(*([optimizer] if optimizer is not None else []))
        for _ in range(_WARM_UP):
            self._step(module, optimizer)
        warm_s = self._timed(module, optimizer, 1)
        steps = max(_FEWEST, min(_MOST, round(_TURN_S / warm_s)))
        return self._timed(module, optimizer, steps)

    def _timed(self, module: DistributedGraphModule, optimizer: Optimizer | None, steps: int) -> float:
        self.ranks.together()
        start_s = self.ranks.clock_s()
        for _ in range(steps):
            self._step(module, optimizer)
        return max(self.ranks.all(self.ranks.clock_s() - start_s)) / steps

    def _step(self, module: DistributedGraphModule, optimizer: Optimizer | None) -> None:
        args, kwargs = self.inputs.call(self.inputs.tensors)
        if module.plan.forward_only:
            module(*args, **kwargs)
        elif self.has_loss:
            module.forward_backward(*args, **kwargs)
        else:
            outputs = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]
            roots = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        if optimizer is not None:
            optimizer.step()
        module.zero_grad()

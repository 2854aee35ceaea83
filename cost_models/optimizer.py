"""What an optimizer takes: bytes of its states, seconds of its update, and bytes that it makes on the way.

States follow the parameter: a rank that holds a shard of it has the states of that shard, as torch's optimizers do
with DTensors. Two things do not, and are counted whole on every rank: Adafactor's sums of rows and columns, and the
matrix that Muon makes orthogonal. Counts of steps, one number a parameter, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from cost_models.curve_time import operator_curve_s
from cost_models.operator_time import traffic_s
from cost_models.ops import op_time_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Device
from galvatron_fx.ir.cluster.device import UPDATE
from galvatron_fx.ir.graph.metadata import OpCost
from galvatron_fx.ir.plan import optimizers

__all__ = ["ADAM", "OptimizerModel", "ParameterShard", "Update", "Updates", "optimizer_model"]

_ITERATIONS = 5  # of Newton and Schulz in torch.optim.Muon
_HALF = 2  # bytes of a bfloat16, in which Muon multiplies


@dataclass(frozen=True)
class Update:
    """What is done to one kind of parameter.

    ``copies``: states as large as the parameter, in its dtype; ``passes``: how often bytes of the parameter's size are
    read or written by an update that makes nothing on the way; ``temporaries``: what torch 2.13 makes while it updates
    one parameter after the other, in sizes of the parameter, and ``left`` of it while the next is updated (measured
    with ``benchmarks/common/tensor_memory.py``); ``has_sums``: whether rows and columns of the last two dims have a sum
    each, as states; ``is_orthogonal``: whether the update is made orthogonal (:func:`_products`); ``is_whole``: whether
    parameters that are split are updated whole, one at a time (``galvatron_fx/runtime/whole_updates.py``).
    """

    copies: int
    passes: int
    temporaries: int
    left: int
    has_sums: bool = False
    is_orthogonal: bool = False
    is_whole: bool = False

    @property
    def num_states(self) -> int:
        """How many tensors a parameter's states are."""
        return self.copies + (2 if self.has_sums else 0)

    def workspace_bytes(self, shard: ParameterShard) -> int:
        """What is made while ``shard`` is updated: the whole parameter, its gradient and states, where it is split."""
        size_bytes = shard.itemsize * prod(shard.shape) if self.is_whole else shard.size_bytes
        sizes = self.temporaries + (2 + self.copies if size_bytes > shard.size_bytes else 0)
        made_bytes = sizes * size_bytes + self.sums_bytes(shard.shape, shard.itemsize)
        return made_bytes + (_orthogonal_bytes(shard.shape) if self.is_orthogonal else 0)

    def sums_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of the sums of the rows and columns of a parameter of ``shape``; 0 where there are none."""
        if not self.has_sums:
            return 0
        return itemsize * (prod(shape[:-1]) + prod(shape[:-2]) * shape[-1])


@dataclass(frozen=True)
class ParameterShard:
    """What a rank holds of a parameter: the ``shape`` of the whole, bytes on the rank, bytes of an element; and whether
    its optimizer states live in the host's memory, or on disk, and whether it lives there itself (``on_host``).
    """

    shape: tuple[int, ...]
    size_bytes: int
    itemsize: int
    states_on_host: bool = False
    states_on_disk: bool = False
    on_host: bool = False

    @property
    def states_away(self) -> bool:
        """Whether its states come to the device for each update."""
        return self.states_on_host or self.states_on_disk


@dataclass(frozen=True)
class OptimizerModel:
    """An optimizer by ``name``: what it does to ``vectors`` (of one dim or none), to ``matrices`` of two dims, and to
    ``others``, which have more; ``accumulates``: whether its states take up gradients, which are updated by later.
    """

    name: str
    vectors: Update
    matrices: Update
    others: Update
    accumulates: bool = False

    def update(self, shape: Sequence[int]) -> Update:
        """What is done to a parameter of ``shape``."""
        return self.vectors if len(shape) < 2 else self.matrices if len(shape) == 2 else self.others

    def state_bytes(self, shards: Sequence[ParameterShard]) -> int:
        """Bytes of the states of all ``shards``."""
        return round(float(self._of(shards).state_bytes(_sizes(shards)).sum()))

    def update_s(self, device: Device, shards: Sequence[ParameterShard]) -> float:
        """Seconds of the update of ``shards``, one after the other."""
        return float(self._of(shards).update_s(device, _sizes(shards)).sum())

    def temporary_bytes(self, shards: Sequence[ParameterShard]) -> int:
        """The most that the optimizer makes for itself while it updates ``shards``, one after the other."""
        most = before = 0
        for shard in shards:
            update = self.update(shard.shape)
            most, before = max(most, before + update.workspace_bytes(shard)), update.left * shard.size_bytes
        return most

    def updates(self, shapes: Sequence[Sequence[int]], itemsizes: Iterable[int]) -> Updates:
        """The same for parameters of these shapes, as arrays."""
        updates = [self.update(shape) for shape in shapes]
        whole = [one.sums_bytes(shape, size) for one, shape, size in zip(updates, shapes, itemsizes, strict=True)]
        return Updates(
            np.array([one.copies for one in updates], dtype=np.float64),
            np.array(whole, dtype=np.float64),
            np.array([one.passes for one in updates], dtype=np.float64),
            np.array([one.num_states for one in updates], dtype=np.float64),
            tuple(tuple(shape) if one.is_orthogonal else () for one, shape in zip(updates, shapes, strict=True)),
        )

    def _of(self, shards: Sequence[ParameterShard]) -> Updates:
        return self.updates([shard.shape for shard in shards], [shard.itemsize for shard in shards])


@dataclass(frozen=True)
class Updates:
    """Of V parameters: ``copies[V]`` and ``passes[V]`` as :class:`Update` has them, ``whole_bytes[V]``: of states that
    no rank has a part of; ``counts[V]``: of tensors of states; ``orthogonal``: the shapes of those that are made
    orthogonal, () for the others.
    """

    copies: Floats
    whole_bytes: Floats
    passes: Floats
    counts: Floats
    orthogonal: tuple[tuple[int, ...], ...]

    def state_bytes(self, size_bytes: Floats) -> Floats:
        """Bytes of states, for ``size_bytes[V]`` or ``[V, C]`` that a rank holds of each parameter."""
        return _rows(self.copies, size_bytes) * size_bytes + _rows(self.whole_bytes, size_bytes)

    def update_s(self, device: Device, size_bytes: Floats) -> Floats:
        """Seconds of the update, for ``size_bytes[V]`` or ``[V, C]``.

        By the device's measured curve where it has one, which is Adam's, times the passes over Adam's.
        """
        passes, curve = _rows(self.passes, size_bytes), device.curve(UPDATE, "float32")
        if curve is None:
            moving_s = traffic_s(device, passes * size_bytes)
        else:
            moving_s = operator_curve_s(curve, np.zeros(1), size_bytes) * (passes / _ADAM.passes)
        if not any(self.orthogonal):
            return moving_s
        products_s = np.array([_products_s(device, shape) if shape else 0.0 for shape in self.orthogonal])
        return moving_s + _rows(products_s, size_bytes)


def _orthogonal_bytes(shape: Sequence[int]) -> int:
    """Of Muon's products, at their peak: the matrix before and after, twice the square of its shorter side."""
    return _HALF * (2 * prod(shape) + 2 * min(shape) ** 2)


def _products(shape: Sequence[int]) -> list[OpCost]:
    """One iteration of Newton and Schulz on X of ``shape``: A = X X', B = b A + c A A, X = a X + B X.

    Flops, a multiply-add being two, and bytes of bfloat16 (Jordan et al. 2024, Muon; ``torch.optim.Muon``). Every rank
    does all of them; what it gathers for that is not priced.
    """
    short, long = sorted(shape)
    square, whole = short * short, short * long
    return [
        OpCost(2 * square * long, _HALF * whole, _HALF * square),
        OpCost(2 * square * short, _HALF * square, _HALF * square),
        OpCost(2 * square * long, _HALF * (square + whole), _HALF * whole),
    ]


def _products_s(device: Device, shape: Sequence[int]) -> float:
    return _ITERATIONS * sum(float(op_time_s(cost, "bfloat16", device, "matmul")) for cost in _products(shape))


def _rows(amounts: Floats, like: Floats) -> Floats:
    """``amounts[V]`` against ``like[V]`` or ``[V, C]``."""
    return amounts.reshape(-1, *(1,) * (like.ndim - 1))


def _sizes(shards: Sequence[ParameterShard]) -> Floats:
    return np.array([shard.size_bytes for shard in shards], dtype=np.float64)


# Reads the parameter, its gradient and two moments and writes three of them (Kingma & Ba 2015, algorithm 1). Torch
# makes the denominator in two steps, while that of the parameter before is still there.
_ADAM = Update(copies=2, passes=7, temporaries=2, left=1)
# Weight decay and Nesterov's momentum would make a tensor on the way.
_SGD = Update(copies=0, passes=3, temporaries=0, left=0)
_MOMENTUM = Update(copies=1, passes=5, temporaries=0, left=0)
# The gradient for its sums, for the norm of the update and for the update; the parameter for its norm and for the
# update, and written (Shazeer & Stern 2018, algorithm 4).
_FACTORED = Update(copies=0, passes=6, temporaries=1, left=1, has_sums=True, is_whole=True)
_UNFACTORED = Update(copies=1, passes=8, temporaries=2, left=2, is_whole=True)
# The gradient, the momentum (written, too), what the products start from and what they end with, the parameter twice.
_MUON = Update(copies=1, passes=7, temporaries=1, left=0, is_orthogonal=True, is_whole=True)


# The gradient is read, and both moments are read and written, which are read again, and the parameter read and written
# (Zhang et al. 2023, algorithm 2), in each step of one micro-batch.
_ADAMA = Update(copies=2, passes=9, temporaries=1, left=0)


def _for_all(name: str, update: Update, accumulates: bool = False) -> OptimizerModel:
    return OptimizerModel(name, update, update, update, accumulates)


_MODELS = {
    model.name: model
    for model in (
        _for_all("adam", _ADAM),
        _for_all("adamw", _ADAM),
        _for_all("sgd", _SGD),
        _for_all("sgd_momentum", _MOMENTUM),
        OptimizerModel("adafactor", _UNFACTORED, _FACTORED, _FACTORED),
        # torch.optim.Muon takes matrices alone. The rest counts as Adam's; so must the embeddings and the head that one
        # gives to AdamW, but no shape tells them from other matrices.
        OptimizerModel("muon", _ADAM, _MUON, _ADAM),
        _for_all("adama", _ADAMA, accumulates=True),
    )
}

ADAM = _MODELS[optimizers.ADAM]


def optimizer_model(name: str) -> OptimizerModel:
    """The model of the optimizer that a plan names; raises PlanError that lists the known names."""
    optimizers.check_optimizer(name)
    return _MODELS[name]

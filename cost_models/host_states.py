"""What it takes to keep optimizer states in the host's memory: where they are when, and the seconds of their copies.
So it is for parameters there, which come and go with their states; gradients, which are there too, come along.

Parameters are updated one after the other, the largest first. While the new states of one go to the host, those of the
next come to the device, as links carry both directions at once; so the device holds the states of two. Where gradients
are folded, the order is backward's, and small ones come and go with a large neighbour.

An update on the host's cores would move no states; but a parameter and its gradient go there, and the parameter comes
back: for Adam as many bytes in the busier direction, and seven passes over the host's memory beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from cost_models.operator_time import disk_s, host_copy_s
from cost_models.optimizer import OptimizerModel, ParameterShard
from galvatron_fx.ir.cluster.cluster import Cluster, Device

__all__ = ["FoldedStates", "OptimizerStep", "going_bytes", "update_groups", "update_order"]

_AT_ONCE = 1.25


def update_order(shards: Sequence[ParameterShard]) -> list[int]:
    """The order in which parameters with states on the host are updated, the same on all ranks.

    From large to small, as then what goes is about as large as what comes meanwhile.
    """
    sizes = [(prod(shard.shape) * shard.itemsize, shard.size_bytes) for shard in shards]
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


def update_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Which of parameters of such ``sizes`` in bytes, that are updated in this order, have their states come at once,
    by place: together they have a quarter more than the largest at most, so that a bias comes with its weight, and no
    copy of a large one waits for an update of a small one.
    """
    groups: list[list[int]] = []
    total = largest = 0
    for place, size in enumerate(sizes):
        total, largest = total + size, max(largest, size)
        if not groups or total > _AT_ONCE * largest:
            groups.append([])
            total = largest = size
        groups[-1].append(place)
    return groups


def going_bytes(optimizer: OptimizerModel, shard: ParameterShard) -> int:
    """Bytes that go to the host when ``shard`` is updated, as many as come for that beside its gradient."""
    return optimizer.state_bytes([shard]) + (shard.size_bytes if shard.on_host else 0) if shard.states_away else 0


@dataclass(frozen=True)
class OptimizerStep:
    """A step of ``optimizer`` over ``shards``, what a rank holds of the trained parameters."""

    optimizer: OptimizerModel
    shards: Sequence[ParameterShard]

    @property
    def device_bytes(self) -> int:
        """Bytes of states in the device's memory between steps."""
        return self.optimizer.state_bytes(self._here)

    @property
    def host_bytes(self) -> int:
        """Bytes of states in the host's memory."""
        return self.optimizer.state_bytes([shard for shard in self._streamed if shard.states_on_host])

    @property
    def disk_bytes(self) -> int:
        """Bytes of states on disk."""
        return self.optimizer.state_bytes([shard for shard in self._streamed if shard.states_on_disk])

    @property
    def most_bytes(self) -> int:
        """The most that the step takes of the device's memory beside parameters, gradients and states there."""
        going = [going_bytes(self.optimizer, shard) for shard in self._streamed]
        gradients = [shard.size_bytes if shard.on_host else 0 for shard in self._streamed]
        coming = [size + gradient for size, gradient in zip(going, gradients, strict=True)]
        updating = [
            size + self.optimizer.update(shard.shape).workspace_bytes(shard)
            for size, shard in zip(coming, self._streamed, strict=True)
        ]
        copying = [here + there for here, there in zip(going, [*coming, 0][1:], strict=True)]
        return max([self.optimizer.temporary_bytes(self._here), *updating, *copying])

    def copies_s(self, device: Device) -> float:
        """Seconds of copies for the update."""
        return sum(_copies_s(self.optimizer, [[each] for each in self._streamed], device, gradients_come=True))

    def update_s(self, device: Device) -> float:
        """Seconds of the update itself."""
        return self.optimizer.update_s(device, self.shards)

    @cached_property
    def _here(self) -> list[ParameterShard]:
        return [shard for shard in self.shards if not shard.states_away]

    @cached_property
    def _streamed(self) -> list[ParameterShard]:
        away = [shard for shard in self.shards if shard.states_away]
        return [away[i] for i in update_order(away)]


@dataclass(frozen=True)
class FoldedStates:
    """States that come to the device for updates while backward computes; ``shards``: of their parameters, by name.

    Copies from and to pinned memory run beside computing. Files are read and written by the process itself, which
    starts no operators meanwhile.
    """

    optimizer: OptimizerModel
    shards: Mapping[str, ParameterShard]
    cluster: Cluster

    @property
    def run_beside(self) -> bool:
        """Whether computing goes on beside the copies."""
        return self.cluster.overlap.gains and not any(shard.states_on_disk for shard in self.shards.values())

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Those of ``names``, in this order, whose states come, by which come at once."""
        away = [name for name in names if name in self.shards]
        places = update_groups([self.shards[name].size_bytes for name in away])
        return [[away[place] for place in group] for group in places]

    def copies_s(self, groups: Sequence[Sequence[str]]) -> list[float]:
        """Seconds of the copies in front of the updates of each group in this order, and behind the last."""
        shards = [[self.shards[name] for name in group] for group in groups]
        return _copies_s(self.optimizer, shards, self.cluster.device, gradients_come=False)


def _copies_s(
    optimizer: OptimizerModel, groups: Sequence[Sequence[ParameterShard]], device: Device, gradients_come: bool
) -> list[float]:
    """Seconds of copies in front of the updates of each of ``groups`` in order, and behind the last: of what goes of
    one while that of the next comes; of files that are written, and then others read, where that takes longer.

    ``gradients_come``: those of parameters on the host are there, too.
    """

    def files_s(shard: ParameterShard) -> float:
        return disk_s(device, float(optimizer.state_bytes([shard]))) / 2 if shard.states_on_disk else 0.0

    come = [
        sum(_copy_s(optimizer, shard, device, (1 + gradients_come) * shard.on_host) for shard in group)
        for group in groups
    ]
    go = [sum(_copy_s(optimizer, shard, device, int(shard.on_host)) for shard in group) for group in groups]
    files = [sum(map(files_s, group)) for group in groups]
    copied = zip([0.0, *go], [*come, 0.0], strict=True)
    return [max(*copies, sum(filed)) for copies, filed in zip(copied, pairwise([0.0, *files, 0.0]), strict=True)]


def _copy_s(optimizer: OptimizerModel, shard: ParameterShard, device: Device, others: int) -> float:
    """Seconds of the states of ``shard``, and of so many ``others`` of its size, one way."""
    size_bytes = optimizer.state_bytes([shard]) + others * shard.size_bytes
    return float(host_copy_s(device, float(size_bytes), optimizer.update(shard.shape).num_states + others))

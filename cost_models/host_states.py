"""What it takes to keep optimizer states in the host's memory: where they are when, and the seconds of their copies.

Parameters are updated one after the other, the largest first. While the new states of one go to the host, those of the
next come to the device, as links carry both directions at once; so the device holds the states of two.

An update on the host's cores would move no states; but a parameter and its gradient go there, and the parameter comes
back: for Adam as many bytes in the busier direction, and seven passes over the host's memory beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from cost_models.operator_time import disk_s, host_copy_s
from cost_models.optimizer import OptimizerModel, ParameterShard
from galvatron_fx.ir.cluster.cluster import Cluster, Device

__all__ = ["FoldedStates", "OptimizerStep", "update_order"]


def update_order(shards: Sequence[ParameterShard]) -> list[int]:
    """The order in which parameters with states on the host are updated, the same on all ranks.

    From large to small, as then what goes is about as large as what comes meanwhile.
    """
    sizes = [(prod(shard.shape) * shard.itemsize, shard.size_bytes) for shard in shards]
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


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
        held = [*map(self._state_bytes, self._streamed), 0]
        updating = [
            size + self.optimizer.update(shard.shape).workspace_bytes(shard)
            for size, shard in zip(held, self._streamed, strict=False)
        ]
        copying = [here + coming for here, coming in pairwise(held)]
        return max([self.optimizer.temporary_bytes(self._here), *updating, *copying])

    def copies_s(self, device: Device) -> float:
        """Seconds of copies for the update."""
        return sum(_copies_s(self.optimizer, self._streamed, device))

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

    def _state_bytes(self, shard: ParameterShard) -> int:
        return self.optimizer.state_bytes([shard])


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

    def copies_s(self, names: Sequence[str]) -> list[float]:
        """Seconds of the copies in front of each update in this order, and behind the last."""
        return _copies_s(self.optimizer, [self.shards[name] for name in names], self.cluster.device)


def _copies_s(optimizer: OptimizerModel, shards: Sequence[ParameterShard], device: Device) -> list[float]:
    """Seconds of copies in front of the update of each of ``shards`` in order, and behind the last: of the states of
    one that go while those of the next come; of files that are written, and then others read, where that takes longer.
    """
    sizes = [optimizer.state_bytes([shard]) for shard in shards]
    counts = [optimizer.update(shard.shape).num_states for shard in shards]
    copies = [host_copy_s(device, float(size), count) for size, count in zip(sizes, counts, strict=True)]
    files = [
        disk_s(device, float(size)) / 2 if shard.states_on_disk else 0.0
        for size, shard in zip(sizes, shards, strict=True)
    ]
    pairs = zip(pairwise([0.0, *copies, 0.0]), pairwise([0.0, *files, 0.0]), strict=True)
    return [max(*copied, sum(filed)) for copied, filed in pairs]

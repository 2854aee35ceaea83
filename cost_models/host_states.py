"""What it takes to keep optimizer states in the host's memory: where they are when, and the seconds of their copies.

Parameters are updated one after the other, the largest first. While the new states of one go to the host, those of the
next come to the device, as links carry both directions at once; so the device holds the states of two.

An update on the host's cores would move no states; but a parameter and its gradient go there, and the parameter comes
back: for Adam as many bytes in the busier direction, and seven passes over the host's memory beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from cost_models.operator_time import disk_s, host_copy_s
from cost_models.optimizer import OptimizerModel, ParameterShard
from galvatron_fx.ir.cluster.cluster import Device

__all__ = ["OptimizerStep", "update_order"]


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
        """Seconds of copies between device and host, of which one goes while the next comes, or of reading and writing
        the disk, which takes longer.
        """
        each = [
            host_copy_s(device, float(self._state_bytes(shard)), self.optimizer.update(shard.shape).num_states)
            for shard in self._streamed
        ]
        copying_s = sum(map(max, pairwise([0.0, *each, 0.0])))
        return max(copying_s, disk_s(device, float(self.disk_bytes)))

    def update_s(self, device: Device) -> float:
        """Seconds of the update itself."""
        return self.optimizer.update_s(device, self.shards)

    @cached_property
    def _here(self) -> list[ParameterShard]:
        return [shard for shard in self.shards if not (shard.states_on_host or shard.states_on_disk)]

    @cached_property
    def _streamed(self) -> list[ParameterShard]:
        away = [shard for shard in self.shards if shard.states_on_host or shard.states_on_disk]
        return [away[i] for i in update_order(away)]

    def _state_bytes(self, shard: ParameterShard) -> int:
        return self.optimizer.state_bytes([shard])

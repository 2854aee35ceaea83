"""Process groups: collectives, stores, and what is known of ranks that hang."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

__all__ = [
    "Transfer",
    "all_gather_rows",
    "all_reduce_begun",
    "collective_timeout_s",
    "default_store",
    "flight_record",
    "num_process_groups",
    "process_groups",
    "sent_around",
    "store_is_served",
]


def all_gather_rows(x: torch.Tensor, num_ranks: int, group_name: str) -> torch.Tensor:
    """Start an all-gather along dim 0; the result, (num_ranks · rows, ...), is to be waited for.

    By ``out``, as ``all_gather_into_tensor`` damages the heap where collectives of one gloo group overlap: each of its
    two threads then notes, without a lock, a name too long to be held in place ("ALLGATHER_COALESCED",
    ``lastCompletedWorkName`` in torch 2.13's ``ProcessGroupGloo::runLoop``), and frees the one before.
    """
    out = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(x, num_ranks, group_name, out=out)
    return gathered


@dataclass(frozen=True)
class Transfer:
    """A tensor that is on its way to the next rank of a ring, and what comes from the one before."""

    sent: torch.Tensor
    coming: torch.Tensor
    works: Sequence[dist.Work]

    def received(self) -> torch.Tensor:
        """Wait for both, and return what came."""
        for work in self.works:
            work.wait()
        return self.coming


def sent_around(x: torch.Tensor, place: torch.Tensor | None, rank: int, num_ranks: int, group_name: str) -> Transfer:
    """Start to send the contiguous ``x`` to the next rank of a group of ``num_ranks``, and to receive as much from the
    one before, into ``place`` where one is given.
    """
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    coming = torch.empty_like(x) if place is None else place
    ahead, behind = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    asked = [
        dist.P2POp(dist.isend, x, group=group, group_peer=ahead),
        dist.P2POp(dist.irecv, coming, group=group, group_peer=behind),
    ]
    return Transfer(x, coming, dist.batch_isend_irecv(asked))


def all_reduce_begun(x: torch.Tensor, group_name: str) -> dist.Work:
    """Start to sum ``x`` over the ranks of a group, in place."""
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    work: dist.Work | None = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return work


def default_store() -> c10d.Store:
    """The store through which the ranks of the default process group found each other."""
    return _get_default_store()


def store_is_served() -> bool:
    """Whether the store of the default process group is in the memory of a process, and not a file."""
    store = _get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return isinstance(store, c10d.TCPStore)


def collective_timeout_s() -> float:
    """Seconds that a collective of the default process group waits for other ranks."""
    group = _get_default_group()
    backend = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())


def flight_record() -> str | None:
    """The last collectives of this rank as JSON; None where ``TORCH_FR_BUFFER_SIZE`` does not turn the recorder on."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return None
    record = c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return record.decode() if isinstance(record, bytes) else str(record)


def process_groups() -> list[c10d.ProcessGroup]:
    """The process groups that there are, and that this process is in."""
    return list(distributed_c10d._world.pg_map)


def num_process_groups() -> int:
    """How many process groups this process has made, or helped to make: torch numbers them by that."""
    return int(distributed_c10d._world.group_count)

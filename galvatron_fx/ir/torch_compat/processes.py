"""Process groups: collectives, stores, and what is known of ranks that hang."""

from __future__ import annotations

import os

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

__all__ = [
    "all_gather_rows",
    "collective_timeout_s",
    "default_store",
    "flight_record",
    "num_process_groups",
    "process_groups",
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

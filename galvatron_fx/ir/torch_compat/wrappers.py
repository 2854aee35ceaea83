"""What torch's wrappers for several devices do first to a model that they are given, before they change anything."""

from __future__ import annotations

from torch.distributed._composable.contract import STATE_KEY

__all__ = ["ASKED_BY_WRAPPERS", "SET_BY_FSDP", "STATES_OF_WRAPPERS"]

# Attributes that are asked for, and by whom.
ASKED_BY_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_distribute_module_applied": "parallelize_module (or distribute_module)",
}

# What FullyShardedDataParallel assigns, after it has looked for an accelerator.
SET_BY_FSDP = "_is_fsdp_managed_module"

# Where fully_shard and replicate look in a module's __dict__ for what was applied to it: by function.
STATES_OF_WRAPPERS: str = STATE_KEY

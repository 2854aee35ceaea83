"""States of the random number generators of this process: Python's, NumPy's, torch's and the accelerator's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """What :func:`restore` takes."""
    by_generator = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        by_generator["device"] = torch.get_device_module().get_rng_state()
    return by_generator


def restore(found: dict[str, Any]) -> None:
    """Set every generator that ``found`` has a state of and this machine has."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if "device" in found and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(found["device"])

"""The versions of torch that Galvatron-FX is tested with."""

from __future__ import annotations

import warnings

import torch

__all__ = ["NEWEST_TESTED", "OLDEST_TESTED", "torch_version", "warn_of_an_untested_version"]

# What pyproject.toml asks for.
OLDEST_TESTED, NEWEST_TESTED = (2, 13), (2, 15)


def torch_version() -> tuple[int, int]:
    """The major and minor version of the torch that runs."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def warn_of_an_untested_version() -> None:
    """Warn where torch is older or newer than what was tested: private entry points and sharding rules may differ."""
    if not OLDEST_TESTED <= torch_version() <= NEWEST_TESTED:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TESTED, NEWEST_TESTED))
        warnings.warn(
            f"Galvatron-FX is tested with torch {oldest} to {newest}, and this is torch {torch.__version__}: "
            f"hold a plan against one device with galvatron_fx.check before you train, or install another torch",
            stacklevel=2,
        )

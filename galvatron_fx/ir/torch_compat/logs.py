"""Torch's structured trace, which tlparse shows."""

from __future__ import annotations

from torch._logging import _internal as torch_logging

__all__ = ["is_tracing", "trace_artifact"]


def is_tracing() -> bool:
    """Whether ``TORCH_TRACE`` names a folder for structured artifacts.

    Torch's handler is there in any case, and without a folder removes itself at the first artifact. Others do not
    count: pytest adds some to every logger that does not propagate.
    """
    handlers = torch_logging.trace_log.handlers
    return any(isinstance(h, torch_logging.LazyTraceHandler) and h.root_dir is not None for h in handlers)


def trace_artifact(name: str, text: str) -> None:
    """Write ``text`` to the structured trace as an artifact that tlparse shows as a file, if one is kept."""
    torch_logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )

"""The graph after every pass, where torch users look for it: ``TORCH_LOGS``, ``TORCH_TRACE``, or a folder.

``TORCH_LOGS="galvatron_fx"`` tells of every pass in a line, ``TORCH_LOGS="+galvatron_fx"`` prints the graph too;
``TORCH_TRACE=folder`` writes each graph as an artifact that tlparse shows. Nothing is made where nobody asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.torch_compat.logs import is_tracing, trace_artifact

__all__ = ["PassFolder", "dumping"]

OnPass = Callable[[str, fx.GraphModule], None]

_LOG = logging.getLogger(__name__)


def dumping(on_pass: OnPass | None) -> OnPass | None:
    """Return ``on_pass`` with dumps to the log and the trace before it, or as it is where neither is wanted."""
    if not _LOG.isEnabledFor(logging.INFO) and not is_tracing():
        return on_pass

    def dump(name: str, graph: fx.GraphModule) -> None:
        _LOG.info("after %s: %d nodes", name, len(graph.graph.nodes))
        if _LOG.isEnabledFor(logging.DEBUG) or is_tracing():
            text = readable(graph)
            _LOG.debug("graph after %s:\n%s", name, text)
            trace_artifact(f"galvatron_fx_after_{name}", text)
        if on_pass is not None:
            on_pass(name, graph)

    return dump


@dataclass
class PassFolder:
    """Write each graph to a file of its own, numbered in the order of the passes: ``00_Capture.py``, ..."""

    folder: Path
    files: list[Path] = field(default_factory=list)

    def write(self, name: str, text: str) -> None:
        """Write the graph after pass ``name``; raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(self.files):02d}_{name}.py"
        path.write_text(text, encoding="utf-8")
        self.files.append(path)

"""Figures of matplotlib, which is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING

from galvatron_fx.ir.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "require_matplotlib"]


def require_matplotlib() -> None:
    """Raise InputError where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"a picture is drawn with matplotlib, and there is none here: {error}; pip install matplotlib"
        ) from error


def new_figure(width_inch: float, height_inch: float) -> Figure:
    """Make a figure apart from what other code draws; raises InputError where matplotlib is missing."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inch, height_inch))

"""Measurements of the machine at hand, as curves that cost models read: :func:`measure_cluster`.

:func:`measure_calls` adds the operators of one model at their own shapes.
"""

from galvatron_fx.profiling.calls import measure_calls
from galvatron_fx.profiling.machine import StaleProfileWarning, stale, warn_if_stale
from galvatron_fx.profiling.measure import ProfileProgress, measure_cluster

__all__ = ["ProfileProgress", "StaleProfileWarning", "measure_calls", "measure_cluster", "stale", "warn_if_stale"]

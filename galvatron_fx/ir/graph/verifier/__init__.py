"""What must hold at each stage of a graph, as a table of specs; checked after every pass."""

from galvatron_fx.ir.graph.verifier.calls import CallRules, Local, PlacedCall
from galvatron_fx.ir.graph.verifier.stages import STAGES, verify

__all__ = ["STAGES", "CallRules", "Local", "PlacedCall", "verify"]

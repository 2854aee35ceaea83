"""The version of Galvatron-FX; ranks compare it before they run."""

__version__ = "0.1.0"

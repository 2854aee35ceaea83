"""Prices: what operators and collectives cost in flops, bytes and seconds, as formulas with their sources."""

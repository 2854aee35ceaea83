"""Galvatron-FX inside of tools that have a training loop of their own; each module needs the tool of its name."""

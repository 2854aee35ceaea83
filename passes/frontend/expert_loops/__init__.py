"""Loops over experts, each of which takes its own tokens, as products of groups of rows.

In: a model's forward that asks where tokens are by ``torch.where(mask)``, ``nonzero`` or ``x[mask]``. Out: the same
with all rows sorted by expert, in operators whose shapes depend on no value.
"""

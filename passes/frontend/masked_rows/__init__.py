"""Rows that a mask chooses, while a model is traced: all rows are kept, and the mask says which count.

In go calls of torch on ``x[mask]``, ``nonzero`` and what is made of them, whose sizes depend on values; out come calls
on tensors of fixed sizes, whose sums, means, losses and writes leave out the rows that were not chosen.
"""

"""What loops over experts and rows that masks choose have alike, while a model is traced.

In: calls of torch's functions on ``x[mask]``, ``nonzero`` and what is made of them. Out: the words for these: the name
of a function, masks that are the same, tensors of chosen rows, and the number of these.
"""

"""Micro-batches and pipeline stages.

In: a joint graph. Out: the graph of one micro-batch with what surrounds it, and the tasks of every stage; all that
crosses a cut is an explicit input or output.
"""

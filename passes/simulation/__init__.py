"""From a lowered program to seconds and bytes.

In: lowered graphs and a cluster. Out: the time of a step by cause, and the bytes alive at its peak, of every rank; of
long models from a few of their blocks.
"""

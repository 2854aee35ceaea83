"""When the collectives of a lowered graph start.

In: a cut graph with collectives. Out: the same graph, with small collectives bundled, reductions begun early and
gathers begun one block ahead.
"""

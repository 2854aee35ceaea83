"""Facts that are read off a graph, which nobody changes here.

In: a graph. Out: answers about it, such as its blocks, what follows from what, where values lie in memory, and when its
collectives are waited for.
"""

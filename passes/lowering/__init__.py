"""From a graph and a plan to what this rank runs.

In: the priced joint graph, and a strategy for each block. Out: forward and backward graphs, or the tasks of every
pipeline stage, with their collectives where they start, bound to process groups by ``codegen``.
"""

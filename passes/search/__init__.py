"""From a priced graph and a cluster to the fastest plan that fits.

In: the front end's graph, a cluster, and what the user pins. Out: a ``Plan`` with the reasons for it.
"""

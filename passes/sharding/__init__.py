"""From a graph for one rank to a graph for the ranks of a mesh, one merged axis after the other.

In: a blocked graph, and a strategy for each block. Out: the same graph with local shapes, in which every change of
placement is a collective. Rules say how an operator may be split; an integer program chooses among them.
"""

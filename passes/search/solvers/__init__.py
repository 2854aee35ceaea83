"""The exact searches on a cost table.

In: a table and a budget. Out: the strategies of all blocks and the cuts between stages that take the least time.
"""

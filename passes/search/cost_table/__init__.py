"""What every strategy of every block costs.

In: a graph and the strategies to try. Out: a table of seconds and bytes by block and strategy, with what it takes to go
from one strategy to the next block's.
"""

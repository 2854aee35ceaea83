"""From a model to the graph that is planned.

In: an ``nn.Module`` and example inputs. Out: one joint graph of forward and backward, in ATen operators, whose nodes
know their layer block, where the batch lies, and what they cost.
"""

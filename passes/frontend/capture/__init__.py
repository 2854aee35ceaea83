"""From a model to one joint graph of forward and backward, by running it on fake tensors.

In: an ``nn.Module`` and example inputs. Out: ATen operators, sizes as expressions in batch and sequence, and a
signature that says what each input and output is. What cannot be traced is refused with the line and the remedy.
"""

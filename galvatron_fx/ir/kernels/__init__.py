"""Which kernels run an operator on a device: attention, products by oneDNN."""

"""What the network is: loading, attention, packing, heads, kernels."""

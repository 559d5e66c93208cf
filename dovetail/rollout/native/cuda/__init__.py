"""The embedded engine on CUDA: paged keys and values, Triton kernels, whole decode steps in CUDA graphs."""

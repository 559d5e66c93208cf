"""GPU kernels. Imported only where CUDA and Triton are."""

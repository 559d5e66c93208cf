"""Triton kernels of the embedded engine. Tensors in, tensors out; they know nothing of requests or schedules."""

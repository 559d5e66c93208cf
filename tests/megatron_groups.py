"""Megatron's process groups belong to the process: tests that make several layouts in one forget those of before."""

from __future__ import annotations


def destroy_layout() -> None:
    """So that another layout can be made. Backends built on the process groups are of no use after."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.destroy_model_parallel()
    get_cuda_rng_tracker().reset()

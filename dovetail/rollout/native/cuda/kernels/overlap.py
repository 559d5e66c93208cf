"""Kernels that begin while the one before them ends: what they may do early, and where they wait.

A kernel started so may read what no kernel of its step writes (weights, tables of pages), or what an earlier one than
that before it wrote: each waits for the whole of its predecessor before it lets its successor begin.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from triton.language.extra import cuda  # pyrefly: ignore[missing-import]


@lru_cache(maxsize=16)
def overlaps(device: torch.device) -> bool:
    """Since Hopper a kernel can be started before the one before it is over."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for the kernel before; then let the next one begin."""
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def ask(row_ptrs, AHEAD: tl.constexpr):
    """Let the first AHEAD values of two bytes of each of these rows (n, 1) be brought into the L2 cache."""
    if AHEAD > 0:
        lines = (row_ptrs + tl.arange(0, AHEAD // 64)[None, :] * 64).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )

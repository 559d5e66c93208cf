"""The fastest that a device multiplies matrices, in FLOP/s: what utilisation is measured against.

GPUs are looked up: their makers publish dense peaks. A CPU is measured where the training runs, with its threads and
its precision setting. For any other device the peak is unknown (None).
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass

import torch

_TERA = 1e12


@dataclass(frozen=True)
class PublishedPeak:
    """Dense tera-FLOP/s without sparsity: bfloat16 and float16 (float32 sums), TF32, and plain float32."""

    half: float
    tf32: float
    float32: float


# Looked for as words of the device's name, in this order: a longer name stands before a shorter one that it contains.
PUBLISHED: dict[str, PublishedPeak] = {
    "GB200": PublishedPeak(2500.0, 1250.0, 80.0),
    "B200": PublishedPeak(2250.0, 1125.0, 75.0),
    "H100 PCIe": PublishedPeak(756.0, 378.0, 51.0),
    "H100 NVL": PublishedPeak(835.0, 417.5, 60.0),
    "GH200": PublishedPeak(989.4, 494.7, 66.9),
    "H200": PublishedPeak(989.4, 494.7, 66.9),
    "H100": PublishedPeak(989.4, 494.7, 66.9),
    "H800": PublishedPeak(989.4, 494.7, 66.9),
    "H20": PublishedPeak(148.0, 74.0, 44.0),
    "A100": PublishedPeak(312.0, 156.0, 19.5),
    "A800": PublishedPeak(312.0, 156.0, 19.5),
    "L40S": PublishedPeak(362.05, 183.0, 91.6),
    "L40": PublishedPeak(181.05, 90.5, 90.5),
    "L20": PublishedPeak(119.5, 59.8, 59.8),
    "L4": PublishedPeak(121.0, 60.0, 30.3),
    "A40": PublishedPeak(149.7, 74.8, 37.4),
    "A10": PublishedPeak(125.0, 62.5, 31.2),
    "MI300X": PublishedPeak(1307.4, 653.7, 163.4),
}

_SIZE = 768
_REPEATS = 5


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of products in `dtype`, under the float32 precision this process has set; None when it is not known."""
    if device.type == "cpu":
        return _measured(dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())
    if device.type != "cuda":
        return None
    return published_peak(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision())


def published_peak(name: str, dtype: torch.dtype, float32_precision: str) -> float | None:
    """FLOP/s of the GPU called `name`; None for names and dtypes that are not in the table."""
    peak = next((peak for part, peak in PUBLISHED.items() if re.search(rf"\b{part}\b", name)), None)
    if peak is None:
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return peak.half * _TERA
    if dtype != torch.float32:
        return None
    return (peak.float32 if float32_precision == "highest" else peak.tf32) * _TERA


@functools.cache
def _measured(dtype: torch.dtype, num_threads: int, float32_precision: str) -> float:
    """The best of a few products of square matrices, after one that warms up, under the process's settings.

    Takes some tens of milliseconds, once.
    """
    left, right = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    torch.mm(left, right)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best

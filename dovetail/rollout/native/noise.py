"""Counter-based random numbers: a pure function of (key, counter), the same on every device and in any batch.

Never reads or moves torch's generators. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def stream_key(seed: int, sample_index: int) -> int:
    """Key of one sample's stream, as the signed 64-bit integer a torch tensor holds."""
    return _signed(_mix_int(_mix_int(seed & _WORD) + (sample_index + 1) * _GOLDEN))


def fold(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """New keys from keys and counters (int64, broadcast together): one key per position, per block, ..."""
    return _mix(keys + (counters + 1) * _signed(_GOLDEN))


def exponentials(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(rows, count) standard exponential variates in float64, strictly positive; row r depends on keys[r] only."""
    counters = torch.arange(count, device=keys.device, dtype=torch.int64)
    bits = fold(keys.unsqueeze(-1), counters)
    # 52 bits, centred: the largest value is 1 - 2**-53, so the logarithm never reaches 0 and a ratio never 0 / 0.
    uniform = ((bits >> 12) & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    # torch shifts int64 arithmetically: masking the copied sign bits away makes the shift logical.
    x = x ^ ((x >> 30) & ((1 << 34) - 1))
    x = x * _signed(_MIX_1)
    x = x ^ ((x >> 27) & ((1 << 37) - 1))
    x = x * _signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_int(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x &= _WORD
    return x - (1 << 64) if x >> 63 else x

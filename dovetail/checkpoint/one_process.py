"""Silence torch's checkpoint functions, which warn at every save and load in a single process.

`no_dist=True` says so already, and they warn nevertheless (torch 2.11 to 2.13, `checkpoint/state_dict_saver.py`).
"""

from __future__ import annotations

import re
import warnings

_WARNING = "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to"
_PATTERN = re.compile(_WARNING, re.IGNORECASE)


def without_collectives(world_size: int) -> bool:
    """The value of `no_dist` for this many processes; with one, its warning is silenced."""
    # For the process and not with `catch_warnings`: that is not safe in threads, and saves run in one. Once only:
    # every change of the filters makes Python repeat all other warnings it has shown.
    if world_size == 1 and not any(entry[1] == _PATTERN for entry in warnings.filters):
        warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)
    return world_size == 1

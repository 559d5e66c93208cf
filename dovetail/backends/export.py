"""A folder that plain transformers and vLLM load, from the weights a backend trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dovetail.backends.base import TrainBackend
from dovetail.checkpoint.sharded import together
from dovetail.models.save import save_hf_folder


def export_hf_folder(
    backend: TrainBackend,
    out: Path,
    *,
    tokenizer: Any | None = None,
    dtype: torch.dtype | None = None,
    source: str | Path | None = None,
) -> Path:
    """Write the full weights, adapters merged in, as safetensors. Rank 0 writes, tensor by tensor; collective.

    `source` is the folder the model was read from: see `save_hf_folder`.
    """
    weights = backend.named_weights()

    def write() -> None:
        try:
            if backend.rank_info.rank == 0:
                save_hf_folder(weights, backend.hf_config, tokenizer, out, dtype=dtype, source=source)
        finally:
            # Gathering is collective: a writer that fails half-way must not leave the other ranks waiting for it.
            for _ in weights:
                pass

    together(write)
    return out

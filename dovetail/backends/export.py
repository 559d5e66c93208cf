"""A folder that plain transformers and vLLM load, from the weights a backend trains."""

from __future__ import annotations

from collections.abc import Collection
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
    stop_ids: Collection[int] = (),
) -> Path:
    """Write the full weights, adapters merged in, as safetensors. Rank 0 writes, tensor by tensor; collective.

    `source` is the folder the model was read from, `stop_ids` end its responses: see `save_hf_folder`.
    """
    weights = backend.named_weights()

    def write() -> None:
        try:
            if backend.rank_info.rank == 0:
                save_hf_folder(
                    weights, backend.hf_config, tokenizer, out, dtype=dtype, source=source, stop_ids=stop_ids
                )
        finally:
            # Gathering is collective: a writer that fails half-way must not leave the other ranks waiting for it.
            for _ in weights:
                pass

    together(write)
    return out

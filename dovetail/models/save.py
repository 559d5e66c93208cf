"""Write a model folder in Hugging Face layout from a stream of tensors, all or nothing.

Shards are written as they fill, so the peak is one shard; the folder appears under its name only when complete.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.models.longrope import as_in_folder
from dovetail.models.prediction_layers import PredictionLayers
from dovetail.models.stop_ids import GENERATION_CONFIG, name_stop_ids
from dovetail.observability.disk import make_readable

# Copied as they are: transformers refuses to write some generation configs that it reads.
_UNCHANGED = (
    GENERATION_CONFIG,
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
)


def save_hf_folder(
    weights: Iterable[tuple[str, Tensor]],
    config: Any,
    tokenizer: Any | None,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    source: str | Path | None = None,
    stop_ids: Collection[int] = (),
) -> Path:
    """Save `(name on disk, full tensor)` pairs, the config and the tokenizer or processor; replaces `out`.

    From `source`, the folder the model was read from, comes what training does not change: the tokens that end an
    answer, how pictures are read, layers that predict further tokens. `stop_ids` end an answer beside these. Names on
    disk come from `to_checkpoint_tensors`. A reader never sees half a folder: it is written beside `out` and renamed.
    """
    out = Path(out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        further = PredictionLayers(source)
        written = _write_shards(further.after(iter(weights), config), work, dtype, max_shard_bytes)
        described = copy.deepcopy(config)
        further.describe(described)
        as_in_folder(described)
        described.dtype = written or config.dtype  # readers cast the weights to what it says
        described.save_pretrained(work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        if source is not None:
            _copy_unchanged(Path(source).expanduser(), work)
        name_stop_ids(work, described, stop_ids)
        publish_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _copy_unchanged(source: Path, work: Path) -> None:
    for name in _UNCHANGED:
        if (source / name).is_file():
            shutil.copyfile(source / name, work / name)


def publish_folder(work: Path, out: Path) -> None:
    """Give the finished folder `work` the name `out`; an older `out` is replaced by two renames."""
    make_readable(work)
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        os.rename(out, old / out.name)
        try:
            os.rename(work, out)
        except OSError:
            os.rename(old / out.name, out)
            raise
        finally:
            shutil.rmtree(old)
    else:
        os.rename(work, out)


def _write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype | None, max_shard_bytes: int
) -> torch.dtype | None:
    """Returns the dtype of the weights: that of the first with a floating-point one."""
    written: torch.dtype | None = None
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        held = tensor.detach().to(device="cpu", dtype=cast, copy=True).contiguous()  # views of one storage are refused
        if pending and size + held.nbytes > max_shard_bytes:
            flush()
            size = 0
        pending[name] = held
        written = written or (cast if tensor.is_floating_point() else None)
        size += held.nbytes
        total += held.nbytes
    if pending or not shards:
        flush()
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return written
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return written

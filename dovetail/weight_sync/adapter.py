"""A low-rank adapter on its way to an engine that applies it beside its own base weights. Merges nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from dovetail.weight_sync.stream import NamedTensors

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraAdapter:
    """`tensors` are named `<module>.lora_A.weight` and `<module>.lora_B.weight`, modules as in Hugging Face's model.

    A module computes `W x + alpha / rank * B A x`.
    """

    rank: int
    alpha: float
    tensors: NamedTensors


def write_peft_folder(adapter: LoraAdapter, folder: Path) -> list[str]:
    """The adapter as a folder that peft and engines read; returns the names of its tensors."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors}
    if not tensors:
        raise ValueError("the adapter has no tensors; train with lora_rank above 0, or send merged weights.")
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return list(tensors)

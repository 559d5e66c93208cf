"""How far a student is from its teacher over the whole vocabulary, from the last hidden states of both.

The two distributions of a token are `[V]` numbers each. They are made chunk by chunk from hidden states, forward and
again in backward, and never held for a whole batch. The teacher's output layer is frozen and read from its folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dovetail.algorithms.distillation import Divergence, vocabulary_divergence
from dovetail.models.errors import ModelError
from dovetail.models.head import chunk_log_probs, default_chunk_size
from dovetail.models.load import build_meta_model, model_folder
from dovetail.models.logits import logit_transform
from dovetail.models.weights import iter_model_tensors

TENSORS_HELD = 4
"""Of the size of a chunk's logits: log-probs of both models, and what backward makes of them."""


@dataclass(frozen=True)
class OutputLayer:
    """What turns hidden states into logits. Not a tuple: FSDP2 would cast the tensors of one at every call."""

    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, hidden: Tensor, *, temperature: float, dtype: torch.dtype, size: int) -> Tensor:
        """`[N, size]` float32, of the first `size` tokens alone."""
        return chunk_log_probs(
            hidden, self.weight, self.bias, temperature=temperature / self.logit_scale, softcap=self.softcap,
            dtype=dtype, size=size,
        )  # fmt: skip


@dataclass(frozen=True)
class Teacher:
    """The frozen layer, the divergence from what it says, and `[..., H]` hidden states for it to read."""

    layer: OutputLayer
    divergence: Divergence = "reverse"
    hidden: Tensor | None = None
    log_prob_min: float | None = None


def divergence_from(
    hidden: Tensor, layer: OutputLayer, teacher: Teacher, *, temperature: float, chunk_size: int | None = None
) -> Tensor:
    """`[N]` float32: the divergence at each row, over the tokens that both vocabularies have."""
    assert teacher.hidden is not None, "the batch has the teacher's hidden states"
    device, size = hidden.device.type, min(layer.weight.size(0), teacher.layer.weight.size(0))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype

    def of_chunk(part: Tensor, teachers: Tensor) -> Tensor:
        log_p = layer.log_probs(part, temperature=temperature, dtype=dtype, size=size)
        with torch.no_grad():
            own = teacher.layer.weight.dtype
            log_q = teacher.layer.log_probs(teachers, temperature=temperature, dtype=own, size=size)
        return vocabulary_divergence(log_p, log_q, teacher.divergence, teacher.log_prob_min)

    rows = chunk_size or max(1, default_chunk_size(layer.weight) // TENSORS_HELD)
    with torch.autocast(device, enabled=False):
        pairs = zip(hidden.split(rows), teacher.hidden.split(rows), strict=True)
        parts = [checkpoint(of_chunk, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.cat(parts)


def load_output_layer(path: str, *, dtype: torch.dtype, device: torch.device, **options: Any) -> OutputLayer:
    """The output layer of a model's folder alone; `options` are those of `build_meta_model`."""
    hf_model = build_meta_model(path, "policy", dtype=dtype, **options)
    layer = hf_model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ModelError(f"{path}: {type(hf_model).__name__} has no linear output layer; use distill.kl=sampled.")
    places = {id(layer.weight): "weight", id(layer.bias): "bias"}
    # A tied weight is on disk under the name of the embedding.
    names = {
        name: places[id(parameter)]
        for name, parameter in hf_model.named_parameters(remove_duplicate=False)
        if id(parameter) in places
    }
    tensors: dict[str, Tensor] = {
        names[name]: tensor.to(device=device, dtype=dtype)
        for name, tensor in iter_model_tensors(hf_model, Path(model_folder(path)), only=set(names))
    }
    if missing := set(names.values()) - set(tensors):
        raise ModelError(f"{path} holds no tensor for the {missing.pop()} of the output layer; download it again.")
    scale, softcap = logit_transform(hf_model)
    return OutputLayer(tensors["weight"], tensors.get("bias"), scale, softcap)

"""An engine in half precision ends with the same bits, whether it rounds the weights or gets them rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.models.weights import to_checkpoint_tensors
from dovetail.rollout.native.engine import NativeEngine
from dovetail.weight_sync import in_engine_dtype
from tests.models.tiny import save_tiny_model, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_weights_that_arrive_rounded_are_bit_equal_to_weights_rounded_by_the_engine(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(family, seed=1).float()
    stream = [(name, tensor.detach()) for name, tensor in to_checkpoint_tensors(model, model.named_parameters())]
    engine = NativeEngine(save_tiny_model(family, tmp_path, tokenizer=False), dtype=torch.bfloat16)
    names = [name for name, _ in stream]
    engine.update_weights(stream, 1)
    rounded_there = engine.weight_checksums(names)
    engine.update_weights([(name, torch.zeros_like(tensor)) for name, tensor in stream], 2)
    assert engine.weight_checksums(names) != rounded_there
    sent = list(in_engine_dtype(stream, "bfloat16"))
    engine.update_weights(sent, 3)
    assert engine.weight_checksums(names) == rounded_there
    assert sum(tensor.nbytes for _, tensor in sent) < 0.6 * sum(tensor.nbytes for _, tensor in stream)

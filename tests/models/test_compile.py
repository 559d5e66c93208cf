"""Compiled layers: one program for micro-batches of any number of sequences and tokens."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from dovetail.models.attention import PACKED_ATTENTION, no_mask, register_packed_attention
from dovetail.models.packing import PackedSegments
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_are_compiled_once_whatever_the_number_of_sequences(device: str) -> None:
    register_packed_attention()
    model = tiny_model("qwen2").to(device)
    model.set_attn_implementation(PACKED_ATTENTION)
    programs = CompileCounter()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=programs)

    def run(*lengths: int) -> int:
        """One micro-batch; how many programs there are after it."""
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        ids = torch.arange(sum(lengths), device=device)[None] % 50
        segments = PackedSegments(lengths, offsets)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": no_mask().to(device)}
        model(**inputs, use_cache=False, segments=segments).logits.sum().backward()
        return programs.frame_count

    first = run(3, 4)
    assert first > 0
    assert [run(*[2 + number % 3] * number) for number in range(3, 15)] == [first] * 12

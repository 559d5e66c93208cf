"""Packing: tokens in order, round trip exact, and packed models equal to padded ones."""

from __future__ import annotations

import pytest
import torch

from dovetail.models.packing import pack_batch
from dovetail.models.policy import PolicyModel
from tests.models.tiny import FAMILIES, image_batch, ragged_batch, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_packing_keeps_order_and_unpacking_restores_places(side: str) -> None:
    batch = ragged_batch([3, 7, 1, 5], total=9, side=side)
    packed = pack_batch(**batch)
    mask = batch["attention_mask"].bool()
    assert torch.equal(packed.input_ids[0], batch["input_ids"][mask])
    assert packed.segments.lengths == (3, 7, 1, 5)
    assert packed.segments.cu_seqlens.tolist() == [0, 3, 10, 11, 16]
    assert packed.position_ids.tolist() == [[*range(3), *range(7), 0, *range(5)]]
    values = torch.randn(*mask.shape, 2)
    assert torch.equal(packed.unpack(packed.pack(values)), values * mask.unsqueeze(-1))


def test_rows_without_tokens_are_left_out_and_come_back_as_zeros() -> None:
    batch = ragged_batch([3, 2], total=4)
    batch["attention_mask"][0] = 0
    packed = pack_batch(**batch)
    assert packed.segments.lengths == (2,)
    assert packed.unpack(torch.ones(2)).tolist() == [[0, 0, 0, 0], [1, 1, 0, 0]]
    with pytest.raises(ValueError, match="no token set"):
        pack_batch(batch["input_ids"], torch.zeros_like(batch["input_ids"]))


def test_several_position_axes_are_packed_axis_first() -> None:
    batch = ragged_batch([2, 3], side="left")
    positions = torch.arange(2 * 3 * 3).view(2, 3, 3)
    packed = pack_batch(**batch, position_ids=positions)
    assert packed.position_ids.shape == (3, 1, 5)
    assert packed.position_ids[1, 0].tolist() == [4, 5, 12, 13, 14]


def _batch_for(family: str) -> dict:
    if family == "qwen2_5_vl":
        return image_batch()
    return ragged_batch([5, 21, 1, 13], total=24, side="both")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_packed_equals_padded_in_log_probs_entropy_and_gradients(family: str, fused: bool) -> None:
    batch = _batch_for(family)
    results = []
    for use_remove_padding in (False, True):
        policy = PolicyModel(
            tiny_model(family), use_remove_padding=use_remove_padding, use_fused_kernels=fused and use_remove_padding
        )
        out = policy(**batch, need_entropy=True, temperature=0.8)
        (out.log_probs.mul(torch.linspace(0.5, 2, out.log_probs.numel()).view_as(out.log_probs)).sum()).backward()
        results.append((out, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}))
    (padded, padded_grads), (packed, packed_grads) = results
    torch.testing.assert_close(packed.log_probs, padded.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed.entropy, padded.entropy, atol=1e-5, rtol=1e-5)
    assert padded_grads.keys() == packed_grads.keys()
    for name, want in padded_grads.items():
        torch.testing.assert_close(packed_grads[name], want, atol=1e-5 * want.abs().max().item() + 1e-7, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probs_equal_transformers_row_by_row(side: str) -> None:
    batch = ragged_batch([4, 11, 7], total=13, side=side)
    model = tiny_model("llama")
    log_probs = PolicyModel(model)(**batch).log_probs
    for ids, mask, found in zip(batch["input_ids"], batch["attention_mask"].bool(), log_probs, strict=True):
        alone = ids[mask][None]
        logits = model(input_ids=alone, use_cache=False).logits[0]
        want = logits.log_softmax(-1)[:-1].gather(-1, alone[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(found[mask][1:], want, atol=1e-5, rtol=1e-5)
        assert found[mask][0] == 0
        assert found[~mask].abs().sum() == 0


def test_the_head_runs_only_where_a_log_prob_is_wanted() -> None:
    batch = ragged_batch([6, 9], total=10, side="left")
    policy = PolicyModel(tiny_model("llama"))
    rows = []
    handle = policy.hf_model.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].size(0)))
    wanted = torch.zeros_like(batch["input_ids"])
    wanted[:, -3:] = 1
    part = policy(**batch, token_mask=wanted).log_probs
    whole = policy(**batch).log_probs
    handle.remove()
    assert rows == [6, 5 + 8]
    torch.testing.assert_close(part[:, -3:], whole[:, -3:], atol=1e-5, rtol=1e-5)
    assert part[:, :-3].abs().sum() == 0


def test_a_model_whose_attention_would_mix_sequences_is_refused() -> None:
    policy = PolicyModel(tiny_model("llama"))
    policy.hf_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="would mix packed"):
        policy(**ragged_batch([3, 4]))


def test_packed_attention_refuses_what_it_cannot_compute() -> None:
    from dovetail.models.attention import packed_attention

    segments = pack_batch(**ragged_batch([3, 4])).segments
    q = torch.randn(1, 4, 7, 32)
    with pytest.raises(NotImplementedError, match="softcap=30"):
        packed_attention(torch.nn.Identity(), q, q, q, None, segments=segments, softcap=30.0)

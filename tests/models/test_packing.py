"""Packing: tokens in order, each in its place, packed models equal to padded ones, with shared prefixes, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    PhimoeConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
)

from dovetail.models import attention
from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.errors import ModelError
from dovetail.models.packing import pack_batch
from dovetail.models.policy import PolicyModel
from dovetail.models.value import ValueModel
from tests.models.tiny import FAMILIES, TEXT_FAMILIES, image_batch, ragged_batch, run_model, tiny_config, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_packing_keeps_order_and_says_where_each_token_stands(side: str) -> None:
    batch = ragged_batch([3, 7, 1, 5], total=9, side=side)
    packed = pack_batch(**batch)
    mask = batch["attention_mask"].bool()
    assert torch.equal(packed.input_ids[0], batch["input_ids"][mask])
    assert packed.segments.lengths == (3, 7, 1, 5)
    assert packed.segments.cu_seqlens.tolist() == [0, 3, 10, 11, 16]
    assert packed.position_ids.tolist() == [[*range(3), *range(7), 0, *range(5)]]
    assert torch.equal(packed.places[mask], torch.arange(16))
    assert packed.places[~mask].eq(-1).all()


def test_rows_without_tokens_are_left_out_and_come_back_as_zeros() -> None:
    batch = ragged_batch([3, 2], total=4)
    batch["attention_mask"][0] = 0
    packed = pack_batch(**batch)
    assert packed.segments.lengths == (2,)
    assert packed.places.tolist() == [[-1, -1, -1, -1], [0, 1, -1, -1]]
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
        out = run_model(policy, **batch, need_entropy=True, temperature=0.8)
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
    log_probs = run_model(PolicyModel(model), **batch).log_probs
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
    part = run_model(policy, **batch, token_mask=wanted).log_probs
    whole = run_model(policy, **batch).log_probs
    handle.remove()
    assert rows == [6, 5 + 8]
    torch.testing.assert_close(part[:, -3:], whole[:, -3:], atol=1e-5, rtol=1e-5)
    assert part[:, :-3].abs().sum() == 0


def test_a_model_whose_attention_would_mix_sequences_is_refused() -> None:
    policy = PolicyModel(tiny_model("llama"))
    policy.hf_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="would mix packed"):
        run_model(policy, **ragged_batch([3, 4]))


def test_layers_in_which_packed_sequences_would_mix_are_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention layers, in which packed"):
        PolicyModel(model)
    assert not PolicyModel(model, use_remove_padding=False).use_remove_padding
    model.config.layer_types = None
    type(model)._is_stateful = True
    try:
        with pytest.raises(ModelError, match="recurrent layers"):
            PolicyModel(model)
    finally:
        del type(model)._is_stateful


@pytest.mark.parametrize(
    ("family", "part"),
    [(ModernBertDecoderConfig, "ModernBertDecoderPredictionHead"), (BertConfig, "BertLMPredictionHead")],
)
def test_layers_before_the_head_are_refused(family: type, part: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family(num_hidden_layers=1, is_decoder=True))
    with pytest.raises(ModelError, match=part):
        PolicyModel(model)


def test_packed_attention_refuses_what_it_cannot_compute() -> None:
    from dovetail.models.attention import no_mask, packed_attention

    segments = pack_batch(**ragged_batch([3, 4])).segments
    q = torch.randn(1, 4, 7, 32)
    with pytest.raises(NotImplementedError, match="softcap=30"):
        packed_attention(torch.nn.Identity(), q, q, q, None, segments=segments, softcap=30.0)
    with pytest.raises(NotImplementedError, match="does not hand keywords"):
        packed_attention(torch.nn.Identity(), q, q, q, no_mask())
    with pytest.raises(NotImplementedError, match="is not causal"):
        packed_attention(torch.nn.Identity(), q, q, q, no_mask(), is_causal=False, segments=segments)


SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
LOGITS: dict[str, PretrainedConfig] = {
    "falcon_h1": tiny_config("falcon_h1"),
    "hyperclovax multiplies": HyperCLOVAXConfig(**SIZES, logits_scaling=3.0),
    "granite divides": GraniteConfig(**SIZES, logits_scaling=3.0),
    "recurrent_gemma caps": RecurrentGemmaConfig(**SIZES, lru_width=32, logits_soft_cap=2.0),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_that_a_model_changes_are_changed_here_too(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LOGITS[name]).eval()
    model.get_output_embeddings().weight.data.normal_(0, 0.5)
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        policy = PolicyModel(model, use_remove_padding=False)
        found = run_model(policy, input_ids=ids, attention_mask=torch.ones_like(ids)).log_probs
    torch.testing.assert_close(found[0, 1:], expected, atol=1e-5, rtol=1e-5)


def test_logits_that_a_model_leaves_out_are_refused() -> None:
    model = tiny_model("llama")
    model.config.unpadded_vocab_size = 300
    with pytest.raises(ModelError, match="leaves out the logits from 300 on"):
        PolicyModel(model)


@pytest.mark.parametrize("family", [PhimoeConfig, MixtralConfig])
def test_routers_have_no_noise_in_training(family: type[PretrainedConfig]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family(**SIZES, router_jitter_noise=0.3, num_local_experts=4))
    policy, batch = PolicyModel(model), ragged_batch([5, 9])
    expected = run_model(policy.eval(), **batch).log_probs
    found = run_model(policy.train(), **batch).log_probs
    assert policy.hf_model.model.layers[0].training
    assert torch.equal(found, expected)


def test_a_model_that_counts_positions_by_itself_is_not_packed() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(BartConfig(decoder_layers=1, is_decoder=True))
    with pytest.raises(ModelError, match="takes no position ids"):
        PolicyModel(model)
    PolicyModel(model, use_remove_padding=False)


def test_rows_beyond_a_rotary_embedding_that_follows_the_longest_one_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    policy = PolicyModel(tiny_model("llama", rope_parameters=rope, max_position_embeddings=8))
    run_model(policy, **ragged_batch([5, 8]))
    assert not caplog.messages
    for _ in range(2):
        run_model(policy, **ragged_batch([5, 9]))
    (message,) = caplog.messages
    assert "a row has 9 tokens, and above 8 the rotary embedding" in message
    run_model(PolicyModel(tiny_model("llama")), **ragged_batch([5, 9]))
    assert len(caplog.messages) == 1


def groups(*prompts: list[int], responses: list[list[int]]) -> dict[str, Tensor]:
    """One row for each response to each prompt; prompts padded on the left, responses on the right."""
    longest, width = max(map(len, prompts)), max(map(len, responses))
    ids, masks = [], []
    for prompt in prompts:
        for response in responses:
            left, right = longest - len(prompt), width - len(response)
            ids.append([0] * left + prompt + response + [0] * right)
            masks.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


SYSTEM = [9, 8, 7]
BATCH = groups(
    [*SYSTEM, 11, 12, 13, 14, 15],
    [*SYSTEM, 21, 22, 23, 24, 25, 26],
    responses=[[31], [41, 42, 43, 44], [41, 42, 53], [61, 62, 63, 64, 65, 66, 67]],
)


def test_a_prompt_stands_in_the_row_once() -> None:
    packed = pack_batch(**BATCH, share_prefixes=True)
    shared = packed.segments.shared
    assert shared is not None
    # The second group is whole again: its rows share a prompt of 9 tokens, and only 3 with the first group.
    assert packed.segments.lengths == (9, 4, 3, 7, 10, 4, 3, 7)
    assert [length for _, length in shared.spans] == [0, 8, 8, 8, 0, 9, 9, 9]
    assert shared.lengths == tuple(BATCH["attention_mask"].sum(1).tolist())
    mask = BATCH["attention_mask"].bool()
    row, places = packed.input_ids[0], packed.places[mask]
    assert torch.equal(row[places], BATCH["input_ids"][mask])
    positions = (mask.long().cumsum(1) - 1)[mask]
    assert torch.equal(packed.position_ids[0][places], positions)


def test_rows_that_share_nothing_are_packed_as_ever() -> None:
    batch = groups([5, 6, 7], responses=[[1, 2]])
    other = groups([6, 5, 7], responses=[[1, 2, 3]])
    joined = {name: torch.cat([torch.nn.functional.pad(batch[name], (0, 1)), other[name]]) for name in batch}
    packed = pack_batch(**joined, share_prefixes=True)
    assert packed.segments.shared is None
    assert packed.segments.lengths == (5, 6)


def test_equal_tokens_at_other_positions_are_not_shared() -> None:
    batch = groups([5, 6, 7], responses=[[1, 2], [3, 4]])
    positions = torch.arange(5).repeat(2, 1)
    assert pack_batch(**batch, position_ids=positions, share_prefixes=True).segments.shared is not None
    positions[1] += 1
    assert pack_batch(**batch, position_ids=positions, share_prefixes=True).segments.shared is None


@pytest.mark.parametrize("lengths", [[1, 4, 6], [4, 1, 6], [1, 1]])
def test_a_row_of_one_token_shares_nothing(lengths: list[int]) -> None:
    batch = ragged_batch(lengths)
    batch["input_ids"][:, 0] = 7
    shared = pack_batch(**batch, share_prefixes=True).segments.shared
    assert (shared is None) == (max(lengths) == 1)
    assert shared is None or shared.lengths == tuple(lengths)


def test_a_row_equal_to_another_keeps_a_token_of_its_own() -> None:
    packed = pack_batch(**groups([5, 6, 7], responses=[[1, 2], [1, 2]]), share_prefixes=True)
    assert packed.segments.lengths == (5, 1)


def _results(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    policy = PolicyModel(model, **options)
    wanted = torch.zeros_like(batch["input_ids"])
    wanted[:, -7:] = 1
    out = run_model(policy, **batch, token_mask=wanted, need_entropy=True, temperature=0.8)
    weights = torch.linspace(0.5, 2, out.log_probs.numel()).view_as(out.log_probs)
    (out.log_probs * weights - 0.1 * out.entropy).sum().backward()
    return out, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_log_probs_entropy_and_gradients_are_those_of_whole_sequences(family: str, fused: bool) -> None:
    whole = _results(tiny_model(family), BATCH, use_fused_kernels=fused)
    shared = _results(tiny_model(family), BATCH, use_fused_kernels=fused, share_prefixes=True)
    torch.testing.assert_close(shared[0].log_probs, whole[0].log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared[0].entropy, whole[0].entropy, atol=1e-5, rtol=1e-5)
    assert_same_gradients(shared[1], whole[1])


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        atol = 1e-5 * want.abs().max().item() + 1e-7
        torch.testing.assert_close(
            found[name], want, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_gradient_checkpointing_computes_the_same() -> None:
    plain = _results(tiny_model("qwen2"), BATCH, share_prefixes=True)
    model = tiny_model("qwen2").train()
    enable_gradient_checkpointing(model)
    again = _results(model, BATCH, share_prefixes=True)
    torch.testing.assert_close(again[0].log_probs, plain[0].log_probs)
    assert_same_gradients(again[1], plain[1])


def test_fewer_tokens_go_through_the_layers() -> None:
    counts = []
    for share in (False, True):
        policy = PolicyModel(tiny_model("llama"), share_prefixes=share)
        layer = policy.hf_model.model.layers[0]
        layer.register_forward_hook(lambda module, args, out: counts.append(args[0].size(1)))
        run_model(policy, **BATCH)
    assert counts == [4 * 8 + 4 * 9 + 2 * 15, 8 + 9 + 2 * 15]


def test_values_of_a_critic_are_those_of_whole_sequences() -> None:
    values = []
    for share in (False, True):
        torch.manual_seed(1)
        model = ValueModel(tiny_model("llama"))
        model.share_prefixes = share
        values.append(run_model(model, **BATCH))
    torch.testing.assert_close(values[1], values[0], atol=1e-5, rtol=1e-5)


def test_the_arguments_of_varlen_kernels_say_the_same_as_the_loop_over_sequences() -> None:
    """The kernels run on GPUs only; what they are given is computed here, with the gradient of keys that are shared."""
    segments = pack_batch(**BATCH, share_prefixes=True).segments
    assert segments.shared is not None
    total = sum(segments.lengths)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, total, 8, generator=generator) for heads in (4, 2, 2))
    results = []
    for kernel in (attention._sdpa_by_sequence, _reference_varlen):
        inputs = [t.clone().requires_grad_() for t in (query, key, value)]
        out = kernel(*inputs, segments, attention._Options(0.3, 0.0, 6))
        out.mul(torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, *(t.grad for t in inputs)])
    for loop, varlen in zip(*results, strict=True):
        torch.testing.assert_close(varlen, loop, atol=1e-5, rtol=1e-5)


def _reference_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: Any) -> Tensor:
    """Causal attention as varlen kernels define it: the last query sees the last key."""
    call = attention._varlen(query, key, value, segments)
    outs = []
    for number in range(len(call.cu_seq_q) - 1):
        first, last = (slice(*cu[number : number + 2].tolist()) for cu in (call.cu_seq_q, call.cu_seq_k))
        q, k, v = call.q[first], call.k[last], call.v[last]
        assert q.size(0) <= call.max_q
        assert k.size(0) <= call.max_k
        mask = attention._causal_mask(q.size(0), k.size(0), options.window, q.device)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs).unsqueeze(0)

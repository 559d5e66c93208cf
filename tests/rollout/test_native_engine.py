"""The embedded engine on tiny models of each family: tokens, log-probs, independence of the batch, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GemmaConfig,
    PhimoeConfig,
    PretrainedConfig,
    StableLmConfig,
)

from dovetail.models.load import build_meta_model
from dovetail.rollout import GenerationRequest, GenerationResult, SamplingParams, UnsupportedPromptError
from dovetail.rollout.native.attention import ATTENTION_NAME
from dovetail.rollout.native.engine import NativeEngine
from dovetail.rollout.native.model import _check_supported, refuse_unsupported
from tests.models.tiny import VOCAB_SIZE, WINDOWED, tiny_config, tiny_model

pytestmark = pytest.mark.engine

FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "mixtral", "qwen2_window", *WINDOWED)
SOME_WINDOWED = ("mistral_window", "qwen2_window", "gemma3_text", "olmo3")


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def requests(
    rows: list[list[int]], sampling: SamplingParams, *, first: int = 0, own_seeds: bool = True
) -> list[GenerationRequest]:
    """Request i has seed `first + i`, so the same prompt has the same seed in whatever batch it is sent."""
    return [
        GenerationRequest(f"r{first + i}", row, replace(sampling, seed=first + i) if own_seeds else sampling)
        for i, row in enumerate(rows)
    ]


def transformers_greedy(model: Any, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """Greedy tokens of `generate`, one prompt at a time: no padding, so nothing but the prompt is in play.

    A `guess` of all of them that a forward pass confirms saves the time to generate them.
    """
    if len(guess) == count and greedy_choices(model, prompt, guess) == list(guess):
        return list(guess)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=[], pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_choices(model: Any, prompt: list[int], response: Sequence[int]) -> list[int]:
    """For each place of the response, the likeliest token after all tokens before it."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def plain_log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / temperature
    # In float64: on ARM, torch's own log_softmax in float32 is 4e-5 off for a vocabulary of 49,152.
    return logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1).float()


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(6)
    engine = NativeEngine(model, max_num_seqs=4)
    results = engine.generate(requests(rows, SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)))
    assert tokens(results) == [transformers_greedy(model, row, 20) for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_plain_forward(family: str, temperature: float) -> None:
    model = tiny_model(family)
    rows = prompts(5, seed=1)
    sampling = SamplingParams(temperature=temperature, top_p=0.9, max_new_tokens=24, ignore_eos=True)
    results = NativeEngine(model, max_num_seqs=3).generate(requests(rows, sampling))
    gaps = [
        (torch.tensor(r.log_probs) - plain_log_probs(model, row, r.token_ids, temperature)).abs()
        for row, r in zip(rows, results, strict=True)
    ]
    assert torch.cat(gaps).mean() <= 1e-5
    assert torch.cat(gaps).max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_samples_do_not_depend_on_the_batch(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(64, seed=2)
    sampling = SamplingParams(max_new_tokens=8)
    together = NativeEngine(model, max_num_seqs=64).generate(requests(rows, sampling))
    few_slots = NativeEngine(model, max_num_seqs=5, max_prefill_tokens=32).generate(requests(rows, sampling))
    alone = NativeEngine(model)
    one_by_one = [r for i in range(64) for r in alone.generate(requests(rows[i : i + 1], sampling, first=i))]
    assert tokens(together) == tokens(few_slots) == tokens(one_by_one)
    for a, b in zip(together, one_by_one, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)


def test_samples_do_not_depend_on_the_number_of_engines() -> None:
    model = tiny_model("llama")
    rows = prompts(20, seed=3)
    sampling = SamplingParams(max_new_tokens=16, n=2)
    one = NativeEngine(model).generate(requests(rows, sampling))
    left = NativeEngine(model).generate(requests(rows[:9], sampling))
    right = NativeEngine(model).generate(requests(rows[9:], sampling, first=9))
    assert tokens(one) == tokens(left + right)


@pytest.mark.parametrize("family", ["qwen3", *SOME_WINDOWED])
def test_a_shared_prompt_gives_the_tokens_of_separate_ones_and_is_prefilled_once(family: str) -> None:
    model = tiny_model(family)
    row = prompts(1, seed=4, shortest=40)[0]
    shared = NativeEngine(model, max_num_seqs=3)
    results = shared.generate([GenerationRequest("g", row, SamplingParams(n=7, seed=11, max_new_tokens=12))])
    assert shared.stats.prefill_tokens == len(row) - 1
    assert [r.sample_index for r in results] == list(range(7))
    assert len({tuple(r.token_ids) for r in results}) == 7
    # Sample i alone: ask for i + 1 samples in an engine with one slot and nothing to share from but itself.
    alone = NativeEngine(model, max_num_seqs=1).generate(
        [GenerationRequest("g", row, SamplingParams(n=7, seed=11, max_new_tokens=12))]
    )
    assert tokens(alone) == tokens(results)
    for result in results:
        gap = torch.tensor(result.log_probs) - plain_log_probs(model, row, result.token_ids)
        assert gap.abs().max() <= 1e-4


def test_a_response_continued_as_a_longer_prompt_goes_on_as_if_uninterrupted() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model)
    row = prompts(1, seed=5)[0]
    sampling = SamplingParams(seed=5, max_new_tokens=20, ignore_eos=True)
    whole = engine.generate([GenerationRequest("a", row, sampling)])[0].token_ids
    head = engine.generate([GenerationRequest("a", row, replace(sampling, max_new_tokens=8))])[0].token_ids
    rest = engine.generate([GenerationRequest("a", row + head, replace(sampling, max_new_tokens=12))])[0].token_ids
    assert head + rest == whole


@pytest.mark.parametrize("family", ["qwen2", *SOME_WINDOWED])
def test_chunked_prefill_equals_whole_prefill(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(6, seed=6, shortest=20, longest=90)
    greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    whole = NativeEngine(model).generate(requests(rows, greedy))
    chunked = NativeEngine(model, max_prefill_tokens=13).generate(requests(rows, greedy))
    assert tokens(whole) == tokens(chunked) == [transformers_greedy(model, row, 12) for row in rows]


@pytest.mark.parametrize("family", ["llama", *SOME_WINDOWED])
def test_rows_of_very_unlike_length_decode_together(family: str) -> None:
    model = tiny_model(family)
    rows = [*prompts(2, seed=7, shortest=150, longest=250), *prompts(4, longest=4)]
    rows.append(rows[0][:120])
    sampling = SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)
    results = NativeEngine(model).generate(requests(rows, sampling))
    assert tokens(results) == [transformers_greedy(model, row, 10) for row in rows]


def test_stop_tokens_end_a_response_and_are_kept() -> None:
    model = tiny_model("llama")
    row = prompts(1, seed=8)[0]
    engine = NativeEngine(model)
    greedy = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    full = engine.generate([GenerationRequest("a", row, greedy)])[0]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 20)
    wanted = full.token_ids[5]
    first = full.token_ids.index(wanted)
    stopped = engine.generate([GenerationRequest("a", row, replace(greedy, stop_token_ids=(wanted,)))])[0]
    assert stopped.token_ids == full.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"

    model.generation_config.eos_token_id = [wanted, 2]
    engine = NativeEngine(model)
    assert engine.generate([GenerationRequest("a", row, replace(greedy, ignore_eos=False))])[0] == stopped
    assert engine.generate([GenerationRequest("a", row, greedy)])[0].token_ids == full.token_ids


def test_ragged_ends_leave_the_batch_and_results_keep_their_order() -> None:
    model = tiny_model("llama")
    rows = prompts(12, seed=9)
    asked = [
        GenerationRequest(f"r{i}", row, SamplingParams(temperature=0, max_new_tokens=1 + 3 * (i % 5), ignore_eos=True))
        for i, row in enumerate(rows)
    ]
    engine = NativeEngine(model, max_num_seqs=4)
    results = engine.generate(asked)
    assert [r.request_id for r in results] == [r.request_id for r in asked]
    assert [len(r.token_ids) for r in results] == [r.sampling.max_new_tokens for r in asked]
    assert engine.stats.decode_tokens == sum(r.sampling.max_new_tokens for r in asked)
    assert tokens(results) == [transformers_greedy(model, r.prompt_token_ids, r.sampling.max_new_tokens) for r in asked]


def test_generation_ends_at_the_longest_sequence_the_model_takes() -> None:
    engine = NativeEngine(tiny_model("llama"), max_model_len=16)
    result = engine.generate([GenerationRequest("a", [5] * 10, SamplingParams(max_new_tokens=50, ignore_eos=True))])[0]
    assert (len(result.token_ids), result.finish_reason) == (6, "length")
    with pytest.raises(ValueError, match="'b' has 16 prompt tokens"):
        engine.generate([GenerationRequest("b", [5] * 16)])


def test_what_the_engine_cannot_read_is_named() -> None:
    engine = NativeEngine(tiny_model("llama"))
    with pytest.raises(UnsupportedPromptError, match=r"'a' carries image.*reads token ids only"):
        engine.generate([GenerationRequest("a", [5], multi_modal={"image": [object()]})])
    with pytest.raises(ValueError, match=f"3 to {VOCAB_SIZE}"):
        engine.generate([GenerationRequest("a", [3, VOCAB_SIZE])])
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.generate([GenerationRequest("a", [3]), GenerationRequest("a", [4])])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BartConfig(vocab_size=61, d_model=32, decoder_layers=1, is_decoder=True), "bart has positions that it counts"),
        (GemmaConfig(num_hidden_layers=1, use_bidirectional_attention=True), "gemma has attention to later tokens"),
        (Gemma4TextConfig(num_hidden_layers=6), "gemma4_text has layers that differ in head_dim"),
        (PhimoeConfig(num_hidden_layers=1, sliding_window=8), "phimoe has sliding_window=8 in its mask alone"),
    ],
)
def test_a_model_that_would_see_other_places_or_tokens_is_refused(config: PretrainedConfig, says: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(NotImplementedError, match=says):
        _check_supported(model)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        (StableLmConfig, "StableLmAttention does not hand keywords"),
        (FalconConfig, "model_type=falcon has layers that do not take"),
        (Gemma2Config, "Gemma2Attention has attention soft-capping"),
        (DogeConfig, "DogeAttention has an attention mask of its own making"),
    ],
)
def test_a_model_that_the_engine_does_not_compute_is_told_without_weights(
    family: type[PretrainedConfig], says: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"{says}.*rollout.name=vllm"):
        refuse_unsupported(build_meta_model(family(num_hidden_layers=2)))
    refuse_unsupported(build_meta_model(tiny_config("qwen3_moe")))


def test_a_model_whose_attention_is_its_own_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(NotImplementedError, match="model_type=bloom has layers that do not take"):
        NativeEngine(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="model_type=bloom has layers that do not take"):
        NativeEngine(tmp_path)


def test_bfloat16_log_probs_stay_near_those_of_a_plain_forward() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    rows = prompts(6, seed=10)
    results = NativeEngine(model).generate(requests(rows, SamplingParams(max_new_tokens=16, ignore_eos=True)))
    gaps = [
        (torch.tensor(r.log_probs) - plain_log_probs(model, row, r.token_ids)).abs()
        for row, r in zip(rows, results, strict=True)
    ]
    assert torch.cat(gaps).mean() < 0.02


def test_a_float32_head_keeps_the_logits_of_bfloat16_weights_and_follows_their_updates() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    engine = NativeEngine(model, fp32_lm_head=True)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    head = engine._model.get_output_embeddings()
    head.register_forward_hook(lambda _, args, output: seen.append((args[0].clone(), output.clone())))
    weight = model.get_output_embeddings().weight
    for version, scale in enumerate((1.0, 2.0)):
        seen.clear()
        with torch.no_grad():
            weight.mul_(scale)
        engine.update_weights(None, version)
        engine.generate(requests(prompts(4, seed=10), SamplingParams(max_new_tokens=4, ignore_eos=True)))
        assert seen
        for hidden, logits in seen:
            expected = torch.nn.functional.linear(hidden.float(), weight.float())
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            assert (logits.bfloat16().float() != logits).any()
    assert type(model.get_output_embeddings()) is torch.nn.Linear, "the trainer's module stays as it is"


def test_generation_leaves_the_process_random_state_alone() -> None:
    model = tiny_model("llama")
    before = torch.get_rng_state()
    NativeEngine(model).generate(requests(prompts(3), SamplingParams(max_new_tokens=4), own_seeds=False))
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_seed_samples_differ_from_call_to_call() -> None:
    engine = NativeEngine(tiny_model("llama"))
    asked = requests([[5, 6, 7]], SamplingParams(max_new_tokens=20, ignore_eos=True), own_seeds=False)
    assert tokens(engine.generate(asked)) != tokens(engine.generate(asked))

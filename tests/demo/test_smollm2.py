"""The demo model: conversion is exact, cached and shared, and our log-probs are those of transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.demo.smollm2 import cache_folder, smollm2_folder
from dovetail.models.load import build_meta_model, load_tokenizer, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.weights import load_weights
from tests.models.tiny import run_model

pytestmark = pytest.mark.unit


def _prompts(tokenizer) -> dict[str, torch.Tensor]:
    texts = ["What is the capital of France?", "Write 3 words that rhyme with cat, then stop.", "2+3="]
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": t}], tokenize=False) for t in texts]
    encoded = tokenizer(chats, padding=True, padding_side="left", return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def test_log_probs_equal_plain_transformers_to_a_ten_thousandth() -> None:
    # In float64: on ARM, log_softmax in float32 is 4e-5 off for this vocabulary.
    folder = smollm2_folder(torch.float32)
    policy = PolicyModel(build_meta_model(folder), use_fused_kernels=True).eval()
    materialize(policy, "cpu")
    load_weights(policy, folder)
    batch = _prompts(load_tokenizer(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        found = run_model(policy, **batch, need_entropy=True)
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
            logits = plain(input_ids=ids[mask][None], use_cache=False).logits[0, :-1]
            log_p = logits.log_softmax(-1)
            want = log_p.gather(-1, ids[mask][1:, None]).squeeze(-1).float()
            torch.testing.assert_close(found.log_probs[row][mask][1:], want, atol=1e-4, rtol=0)
            entropy = -(log_p.exp() * log_p).sum(-1).float()
            torch.testing.assert_close(found.entropy[row][mask][1:], entropy, atol=1e-4, rtol=0)


def test_the_model_answers_and_splits_digits() -> None:
    folder = smollm2_folder(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert tokenizer.tokenize("a 2026") == ["a", "Ġ", "2", "0", "2", "6"]


def test_a_second_call_converts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2_folder()
    monkeypatch.delattr("dovetail.demo.smollm2._convert")
    assert smollm2_folder() == folder


def test_the_cache_moves_with_its_variable_and_other_types_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        smollm2_folder(torch.float16)

"""longrope: a row of a run is computed with the same frequencies whatever shares its micro-batch, as vLLM does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, PhimoeConfig

from dovetail.models.load import build_meta_model, materialize
from dovetail.models.policy import PolicyModel
from dovetail.models.save import save_hf_folder
from dovetail.models.weights import load_weights
from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.native.engine import NativeEngine
from tests.models.tiny import ragged_batch, run_model

pytestmark = pytest.mark.unit

ORIGINAL, LONGEST = 16, 40
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "phi3": Phi3Config(**SIZES, rope_parameters=ROPE, original_max_position_embeddings=ORIGINAL),
    "phimoe": PhimoeConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=ROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    ),
    "llama": LlamaConfig(**SIZES, rope_parameters=ROPE),
}


def _folder(family: str, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.12)
    model.save_pretrained(folder)
    return folder


def _policy(folder: Path, longest_row: int | None, **options: Any) -> PolicyModel:
    policy = PolicyModel(build_meta_model(folder, longest_row=longest_row), **options)
    materialize(policy, "cpu")
    load_weights(policy, folder)
    return policy.eval()


@torch.no_grad()
def _alone(policy: PolicyModel, ids: Tensor) -> Tensor:
    return run_model(policy, input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).log_probs[0]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_row_does_not_depend_on_the_long_one_beside_it(
    family: str, packs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _folder(family, tmp_path)
    batch = ragged_batch([9, LONGEST])
    rows = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    plain = _policy(folder, None, use_remove_padding=packs)
    with torch.no_grad():
        mixed = run_model(plain, **batch).log_probs
    assert (mixed[0, :9] - _alone(plain, rows[0])).abs().max() > 0.01  # what transformers does
    assert "above 16 the rotary embedding" in caplog.text
    caplog.clear()
    policy = _policy(folder, LONGEST, use_remove_padding=packs)
    with torch.no_grad():
        found = run_model(policy, **batch).log_probs
    for row, ids in zip(found, rows, strict=True):
        torch.testing.assert_close(row[: len(ids)], _alone(policy, ids), atol=1e-5, rtol=1e-5)
    if family != "phimoe":  # transformers 5.19 scales its long rows, and leaves their frequencies at the short set
        torch.testing.assert_close(found[1], _alone(plain, rows[1]), atol=1e-5, rtol=1e-5)
    assert "the rotary embedding" not in caplog.text


def test_a_run_within_the_original_length_keeps_the_short_set(tmp_path: Path) -> None:
    folder = _folder("phi3", tmp_path)
    ids = ragged_batch([9])["input_ids"][0]
    assert torch.equal(_alone(_policy(folder, ORIGINAL), ids), _alone(_policy(folder, None), ids))


def test_the_engine_samples_from_the_log_probs_of_the_trainer_across_the_switch(tmp_path: Path) -> None:
    folder = _folder("llama", tmp_path)
    policy = _policy(folder, LONGEST)
    requests = [
        GenerationRequest(
            str(length), list(range(3, 3 + length)), SamplingParams(max_new_tokens=12, ignore_eos=True, seed=1)
        )
        for length in (5, 10, 28)
    ]
    for model in (folder, policy.hf_model):
        for result in NativeEngine(model, max_num_seqs=4, max_model_len=LONGEST).generate(requests):
            ids = torch.tensor([*requests[[r.request_id for r in requests].index(result.request_id)].prompt_token_ids])
            found = _alone(policy, torch.cat([ids, torch.tensor(result.token_ids)]))[len(ids) :]
            torch.testing.assert_close(torch.tensor(result.log_probs), found, atol=1e-5, rtol=1e-5)


def test_an_exported_folder_has_both_sets(tmp_path: Path) -> None:
    folder = _folder("phi3", tmp_path / "model")
    policy = _policy(folder, LONGEST)
    weights = [(name, tensor.detach()) for name, tensor in policy.hf_model.named_parameters()]
    save_hf_folder(weights, policy.hf_model.config, None, tmp_path / "out")
    before, after = (json.loads((part / "config.json").read_text()) for part in (folder, tmp_path / "out"))
    assert after["rope_parameters"] == before["rope_parameters"]
    assert "rope_of_folder" not in after

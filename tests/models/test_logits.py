"""What a model does to its logits is what its own forward does, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Cohere2VisionConfig,
    CohereConfig,
    ElectraConfig,
    Gemma3Config,
    GemmaConfig,
    LlamaForCausalLM,
    MuseGlimmerConfig,
    PreTrainedConfig,
)

from dovetail.models.errors import ModelError
from dovetail.models.logits import logit_transform
from dovetail.models.policy import PolicyModel
from dovetail.rollout.native.model import share_model
from tests.models.tiny import ragged_batch, run_model, tiny_config, tiny_model

pytestmark = pytest.mark.unit

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip


def _model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    multimodal = hasattr(config, "vision_config")
    model: Any = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config).eval()
    model.get_output_embeddings().weight.data.normal_(0, 0.5)
    return model


@torch.no_grad()
def _log_probs(model: Any, batch: dict[str, Any], **options: Any) -> torch.Tensor:
    return run_model(PolicyModel(model, use_remove_padding=False), **batch, **options).log_probs


COHERE_VISION = {
    "aya_vision": lambda: AyaVisionConfig(
        text_config={"model_type": "cohere", "logit_scale": 0.25, **SIZES}, vision_config=VISION
    ),
    "cohere2_vision": lambda: Cohere2VisionConfig(
        text_config={"model_type": "cohere2", "logit_scale": 0.25, **SIZES}, vision_config=VISION
    ),
}


@pytest.mark.parametrize("family", COHERE_VISION)
def test_the_factor_that_transformers_leaves_out_of_coheres_vision_models_is_applied_and_said(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails once upstream applies it: then take the family out of `_LEAVE_OUT_SCALE`."""
    model = _model(COHERE_VISION[family]())
    batch = ragged_batch([7])
    with torch.no_grad():
        logits = model(**batch).logits[0, :-1]
    found = _log_probs(model, batch)[0, 1:]
    taken = batch["input_ids"][0, 1:, None]
    torch.testing.assert_close(found, (0.25 * logits).log_softmax(-1).gather(-1, taken)[:, 0], atol=1e-5, rtol=1e-5)
    assert (found - logits.log_softmax(-1).gather(-1, taken)[:, 0]).abs().max() > 1
    assert "leaves out logit_scale=0.25" in caplog.text
    with pytest.raises(NotImplementedError, match=r"leaves out logit_scale=0.25.*rollout.name=vllm"):
        share_model(model, None)


@pytest.mark.parametrize("family", COHERE_VISION)
def test_without_a_factor_coheres_vision_models_are_what_transformers_computes(family: str) -> None:
    config = COHERE_VISION[family]()
    config.text_config.logit_scale = 1.0
    assert logit_transform(_model(config)) == (1.0, None)


def test_a_factor_before_the_cap_is_told_from_one_after_it() -> None:
    text = {**SIZES, "output_multiplier": 0.2, "final_logit_softcapping": 2.0, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = _model(MuseGlimmerConfig(text_config=text, vision_config=vision))
    batch = ragged_batch([7])
    with torch.no_grad():
        logits = model(**batch).logits[0, :-1]
    want = logits.log_softmax(-1).gather(-1, batch["input_ids"][0, 1:, None])[:, 0]
    torch.testing.assert_close(_log_probs(model, batch)[0, 1:], want, atol=1e-5, rtol=1e-5)


def test_a_cap_that_the_class_leaves_out_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            Gemma3Config(text_config={**SIZES, "final_logit_softcapping": 7.0, "head_dim": 16}, vision_config=VISION)
        )
    with pytest.raises(ModelError, match=r"leaves out what its config says .*'final_logit_softcapping': 7.0"):
        PolicyModel(model)


def test_layers_between_the_states_and_the_head_are_refused_wherever_they_are() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 32, "embedding_size": 16, "num_attention_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ElectraConfig(**sizes, num_hidden_layers=1, is_decoder=True))
    with pytest.raises(ModelError, match="ElectraForCausalLM makes logits of its states cannot be told"):
        PolicyModel(model)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_config("llama"), (1.0, None)),
        (CohereConfig(**SIZES, logit_scale=0.3), (0.3, None)),
        (GemmaConfig(**SIZES, head_dim=16), (1.0, None)),
    ],
)
def test_the_transform_is_read_from_a_model_without_memory(config: PreTrainedConfig, expected: tuple) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert logit_transform(model) == expected


class _Halves(LlamaForCausalLM):
    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        out.logits = out.logits / 2
        return out


def test_a_class_that_does_more_than_its_config_says_is_refused() -> None:
    with pytest.raises(ModelError, match="_Halves changes its logits in a way"):
        PolicyModel(_Halves(tiny_config("llama")))


class _Wayward(LlamaForCausalLM):
    def forward(self, **inputs: Any) -> Any:
        raise RuntimeError("no logits from me")


def test_code_from_elsewhere_that_cannot_be_followed_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.__class__ = _Wayward
    assert logit_transform(model) == (1.0, None)
    assert "cannot be told (no logits from me)" in caplog.text

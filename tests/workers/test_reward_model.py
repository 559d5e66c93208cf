"""A reward model scores whole answers: with the policy's own tokens, or read again with its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from dovetail.controller import LocalWorkerGroup, RayClassWithInitArgs
from dovetail.protocol import DataProto, validate_stage
from dovetail.workers.reward_model_worker import RewardModelWorker
from tests.models.tiny import tiny_tokenizer
from tests.workers.tiny_run import PROMPT, RESPONSE, TOLERANCE, rollout_batch, run_config, save_classifier, small_model

pytestmark = pytest.mark.unit

ANSWERS = ["Yes.", "ok", "No, 7", "!"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("policy"), "llama")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with another tokenizer: other ids for every byte, another chat template."""
    folder = save_classifier(tmp_path_factory.mktemp("reward"))
    reversed_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def akin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier that reads what the policy writes: the same vocabulary and template, in its own folder."""
    folder = save_classifier(tmp_path_factory.mktemp("akin"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def reversed_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {token: index for index, token in enumerate(["<none>", "<end>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<none>", eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>{% endfor %}"
    return tokenizer


def reward_group(policy: Path, classifier: Path, **changes: Any) -> Any:
    keys = {"reward_model.enable": True, "reward_model.model.path": str(classifier)}
    config = run_config(policy, keys | {f"reward_model.{key}": value for key, value in changes.items()})
    group: Any = LocalWorkerGroup(RayClassWithInitArgs(RewardModelWorker, config=config), role="reward_model")
    group.init_model()
    return group


def score(classifier: Path, ids: torch.Tensor) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, 0].item()


@pytest.mark.parametrize("changes", [{}, {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 20}])
def test_scores_of_the_policys_own_tokens_stand_on_the_last_one(policy: Path, akin: Path, changes: dict) -> None:
    group = reward_group(policy, akin, **changes)
    batch = rollout_batch(6)
    validate_stage(batch, "compute_rm_score")
    found = group.compute_rm_score(batch)
    validate_stage(found.union(batch.select(["responses"])), "compute_rm_score", done=True)
    columns = batch.tensors
    for row, scores in enumerate(found.tensors["rm_scores"]):
        kept = columns["attention_mask"][row].bool()
        last = int(kept[-RESPONSE:].sum()) - 1
        expected = score(akin, columns["input_ids"][row][kept])
        assert scores[last].item() == pytest.approx(expected, abs=TOLERANCE)
        assert scores.count_nonzero() == 1


def test_answers_are_read_again_with_the_models_own_tokenizer_and_template(policy: Path, classifier: Path) -> None:
    group = reward_group(policy, classifier, max_length=64)
    writer, reader = tiny_tokenizer(), reversed_tokenizer()
    batch = chat_batch(writer)
    found = group.compute_rm_score(batch).tensors["rm_scores"]
    for row, answer in enumerate(ANSWERS):
        # "</s>" ends the policy's answer; it is a token of the policy, not text that the reward model should read.
        text = f"[user]Q{row}?<end>[assistant]{answer}<end>"
        ids = torch.tensor(reader.encode(text, add_special_tokens=False))
        last = len(writer.encode(answer, add_special_tokens=False))
        assert found[row, last].item() == pytest.approx(score(classifier, ids), abs=TOLERANCE)
        assert found[row].count_nonzero() == 1


def test_a_prompt_that_is_text_is_read_as_what_a_user_says(policy: Path, classifier: Path) -> None:
    """Policies without a chat template have prompts as text."""
    batch = chat_batch(tiny_tokenizer())
    group = reward_group(policy, classifier, max_length=64)
    expected = group.compute_rm_score(batch).tensors["rm_scores"]
    texts = [messages[0]["content"] for messages in batch.non_tensor_batch["raw_prompt"]]
    plain = DataProto.from_dict(dict(batch.tensors), {"raw_prompt": texts}, batch.meta_info)
    torch.testing.assert_close(group.compute_rm_score(plain).tensors["rm_scores"], expected, atol=0, rtol=0)


def test_a_conversation_that_is_too_long_loses_its_beginning(policy: Path, classifier: Path) -> None:
    found = reward_group(policy, classifier, max_length=9).compute_rm_score(chat_batch(tiny_tokenizer()))
    ids = torch.tensor(reversed_tokenizer().encode("[user]Q0?<end>[assistant]Yes.<end>", add_special_tokens=False))
    assert found.tensors["rm_scores"][0, 4].item() == pytest.approx(score(classifier, ids[-9:]), abs=TOLERANCE)


def test_without_a_limit_a_conversation_is_as_long_as_the_networks_context(policy: Path, classifier: Path) -> None:
    found = reward_group(policy, classifier, use_dynamic_bsz=True).compute_rm_score(chat_batch(tiny_tokenizer()))
    ids = torch.tensor(reversed_tokenizer().encode("[user]Q0?<end>[assistant]Yes.<end>", add_special_tokens=False))
    assert len(ids) > PROMPT + RESPONSE
    assert found.tensors["rm_scores"][0, 4].item() == pytest.approx(score(classifier, ids), abs=TOLERANCE)


def test_input_tokenizer_null_reads_the_policys_tokens_as_they_are(policy: Path, classifier: Path) -> None:
    group = reward_group(policy, classifier, **{"model.input_tokenizer": None})
    batch = rollout_batch(2)
    found = group.compute_rm_score(batch).tensors["rm_scores"]
    kept = batch.tensors["attention_mask"][0].bool()
    expected = score(classifier, batch.tensors["input_ids"][0][kept])
    assert found[0].sum().item() == pytest.approx(expected, abs=TOLERANCE)


def test_reading_again_needs_the_prompts_as_messages(policy: Path, classifier: Path) -> None:
    with pytest.raises(ValueError, match=r"no column raw_prompt; set data\.return_raw_chat=True"):
        reward_group(policy, classifier).compute_rm_score(rollout_batch(2))


def chat_batch(writer: Any) -> DataProto:
    """One short answer per row in the policy's tokens, its end token included."""
    responses = torch.zeros(len(ANSWERS), RESPONSE, dtype=torch.long)
    mask = torch.zeros_like(responses)
    for row, answer in enumerate(ANSWERS):
        ids = [*writer.encode(answer, add_special_tokens=False), writer.eos_token_id]
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    prompts = torch.full((len(ANSWERS), 2), 5)
    attention_mask = torch.cat([torch.ones_like(prompts), mask], dim=1)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "responses": responses,
        },
        {"raw_prompt": [[{"role": "user", "content": f"Q{row}?"}] for row in range(len(ANSWERS))]},
    )

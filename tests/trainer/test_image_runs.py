"""Whole runs on prompts with and without images: ids, positions and pixels reach engine and trainer alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from dovetail.config.rollout import RolloutConfig
from dovetail.data.errors import DataError
from dovetail.data.prompts import PromptDataset
from dovetail.models.load import load_processor, load_tokenizer
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from tests.models.tiny import IMAGE_TOKEN
from tests.trainer.image_run import KEYS, save_image_toy
from tests.trainer.test_workers import answers, assert_close
from tests.trainer.toy_run import DAPO, Toy, repeatable, train, train_apart

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 3
GRPO: dict[str, Any] = {
    **KEYS,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.calculate_sum_pi_squared": True,  # then the pass for old log-probs is over all rows
    "trainer.test_freq": 1,
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return save_image_toy(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def one_worker(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one process, without Ray."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train(toy.config(folder, {**GRPO, "data.val_files": str(toy.data / "val.parquet")}))
    return folder


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def entropies(model: Any, example: dict[str, Any], images: dict[str, torch.Tensor], answer: list[int]) -> torch.Tensor:
    """Of the answer's tokens, by transformers alone."""
    prompt = example["input_ids"][example["attention_mask"].bool()].tolist()
    ids = torch.tensor([prompt + answer])
    types = torch.tensor([[int(token == IMAGE_TOKEN) for token in prompt] + [0] * len(answer)])
    extra = {**images, "mm_token_type_ids": types} if images else {}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0, len(prompt) - 1 : -1]
    return torch.distributions.Categorical(logits=logits).entropy()


def test_engine_and_trainer_agree_at_every_step(one_worker: Path) -> None:
    metrics = RunFolder(one_worker).read_metrics()
    assert [row["rollout_corr/probs_diff_max"] < 1e-6 for row in metrics] == [True] * STEPS
    gaps = [
        gap for step in range(1, STEPS + 1) for row in rollouts(one_worker, step) for gap in row["token_logprob_gaps"]
    ]
    assert max(map(abs, gaps)) <= 1e-5
    assert all(row["actor/grad_norm"] > 0 and "val-core/toy/reward/mean@1" in row for row in metrics)


def test_both_saw_the_pictures_as_transformers_does(toy: Toy, one_worker: Path) -> None:
    """Engine and trainer could agree on the wrong thing: entropies of the first step against a plain forward."""
    tokenizer = load_tokenizer(toy.model)
    processor = load_processor(toy.model, trust_remote_code=True)
    dataset = PromptDataset(str(toy.data / "train.parquet"), tokenizer, toy.config(one_worker, KEYS).data, processor)
    model = AutoModelForImageTextToText.from_pretrained(toy.model, dtype=torch.float32)
    counts = set()
    for row in rollouts(one_worker, 1):
        example, answer = dataset[row["index"]], row["response_ids"]
        if IMAGE_TOKEN in answer:  # transformers takes it for an image
            continue
        images = example["multi_modal_inputs"]
        counts.add(len(images.get("image_grid_thw", ())))
        found = torch.tensor(row["token_entropies"])
        assert (entropies(model, example, images, answer) - found).abs().max() < 1e-4
        if images:
            others = images | {"pixel_values": images["pixel_values"].flip(1)}
            assert (entropies(model, example, others, answer) - found).abs().max() > 1e-2
    assert counts == {0, 1, 2}, "the batch mixes prompts with no, one and two images"


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_workers")
    keys = {**GRPO, "data.val_files": str(folder / "data" / "val.parquet"), "trainer.n_gpus_per_node": 2}
    return train_apart(folder, keys, use_ray=True, make=save_image_toy)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_workers_give_the_answers_and_metrics_of_one(two_workers: Path, one_worker: Path) -> None:
    for step in range(1, STEPS + 1):
        assert answers(two_workers, step) == answers(one_worker, step)
    assert_close(RunFolder(two_workers).read_metrics(), RunFolder(one_worker).read_metrics())


@pytest.mark.parametrize(
    ("changes", "learner"),
    [
        ({"algorithm.adv_estimator": "gae", "critic.model.trust_remote_code": True}, "critic"),
        ({"actor_rollout_ref.model.lora_rank": 4}, "actor"),
        ({"actor_rollout_ref.model.use_remove_padding": False}, "actor"),
    ],
    ids=["critic", "adapter", "padded"],
)
def test_other_ways_to_learn_agree_too(toy: Toy, tmp_path: Path, changes: dict[str, Any], learner: str) -> None:
    _, rows = train(toy.config(tmp_path, {**KEYS, **changes, "trainer.total_training_steps": 2}))
    assert [row["rollout_corr/probs_diff_max"] < 1e-6 for row in rows] == [True] * 2
    assert all(row[f"{learner}/grad_norm"] > 0 for row in rows)


def test_a_resumed_run_continues_to_the_bit_with_images_among_what_it_carried_over(toy: Toy, tmp_path: Path) -> None:
    keys = {**KEYS, **DAPO, "trainer.save_freq": 1}
    _, whole = train(toy.config(tmp_path / "whole", keys))
    checkpoint = tmp_path / "whole" / "global_step_2"
    carried = DataProto.load_from_disk(checkpoint / "surplus.safetensors").non_tensor_batch["multi_modal_inputs"]
    assert any(carried)
    assert not all(carried)
    resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(checkpoint)}
    _, rest = train(toy.config(tmp_path / "rest", {**keys, **resume}))
    assert repeatable(rest)[-1] == repeatable(whole)[-1]
    assert answers(tmp_path / "rest", STEPS) == answers(tmp_path / "whole", STEPS)


def test_pictures_without_tensors_for_the_model_are_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data.return_multi_modal_inputs=True"):
        train(toy.config(tmp_path, {**KEYS, "data.return_multi_modal_inputs": False}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rollout.name": "sglang", "rollout.mode": "server"}, "name=sglang reads token ids only here"),
        (
            {"rollout.name": "vllm", "rollout.mode": "server", "rollout.server_urls": ["http://localhost:1"]},
            "name=vllm reads token ids only by URL",
        ),
    ],
    ids=["sglang", "servers"],
)
def test_engines_of_text_are_refused_before_they_start(
    toy: Toy, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    keys = {f"actor_rollout_ref.{key}": value for key, value in changes.items()}
    with pytest.raises(DataError, match=f"prompts with images or videos, and rollout.{named}"):
        train(toy.config(tmp_path, {**KEYS, **keys}))


def test_agents_and_prompts_with_images_are_refused_before_a_start(toy: Toy, tmp_path: Path) -> None:
    """The engine reads images here; a conversation would be sampled without them."""
    keys = {**KEYS, "actor_rollout_ref.rollout.multi_turn.enable": True}
    with pytest.raises(DataError, match=r"prompts with images or videos, and agents .* read text only"):
        train(toy.config(tmp_path, keys))


def test_the_embedded_engine_reads_images_on_cpu_alone() -> None:
    assert RolloutConfig(name="native").reads_images(on_cuda=False)
    assert not RolloutConfig(name="native").reads_images(on_cuda=True)
    assert RolloutConfig(name="vllm").reads_images(on_cuda=True)

"""Fine-tuning on conversations with images: packed and padded batches are the loss that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.errors import ConfigError
from dovetail.config.root import DovetailConfig
from dovetail.data.files import write_rows
from dovetail.models.load import load_processor, load_tokenizer
from dovetail.trainer.examples import read_examples
from tests.models.tiny import IMAGE_TOKEN, save_tiny_vision_model
from tests.trainer.image_run import _square
from tests.trainer.toy_run import Toy, train

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Conversations with one image, two (one in the second turn) and none, in turn."""
    folder = tmp_path_factory.mktemp("sft_images")
    rows = []
    for number in range(8):
        images = (1, 2, 0)[number % 3]
        questions = ["what <image>" if images else "what", "and <image>" if images == 2 else "and"]
        talk = [
            {"role": role, "content": text}
            for question in questions
            for role, text in (("user", question), ("assistant", "abc" * (1 + number % 2)))
        ]
        rows.append({"messages": talk, "images": [_square(number + other) for other in range(images)]})
    write_rows(rows[:6], folder / "train.parquet")
    write_rows(rows[6:], folder / "val.parquet")
    return Toy(save_tiny_vision_model(folder / "model"), folder)


def config(toy: Toy, run: Path, **changes: Any) -> DovetailConfig:
    keys = {
        "trainer.method": "sft",
        "custom_reward_function.path": None,
        "data.train_files": str(toy.data / "train.parquet"),
        "data.val_files": str(toy.data / "val.parquet"),
        "data.max_length": 128,
        "data.train_batch_size": 6,
        "trainer.val_before_train": True,
        "trainer.total_training_steps": 4,
        f"{MODEL}.trust_remote_code": True,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{ACTOR}.optim.lr": 1e-2,
        f"{ACTOR}.optim.eps": 1e-3,  # Adam's own would make a step of the rounding of gradients that are 0
    }
    return toy.config(run, {**keys, **changes})


def loss_of_transformers(toy: Toy, run: Path, *, flipped: bool = False) -> float:
    """Of all training rows, one by one, without this package's model code."""
    from transformers import AutoModelForImageTextToText

    readers = load_tokenizer(toy.model), load_processor(toy.model, trust_remote_code=True)
    settings = config(toy, run)
    data = read_examples(settings, readers, settings.data.train_paths, max_samples=-1)
    batch = data.batch(range(len(data)))
    model = AutoModelForImageTextToText.from_pretrained(toy.model, dtype=torch.float32)
    total = count = 0.0
    for row in range(len(batch)):
        kept = batch.tensors["attention_mask"][row].bool()
        ids, mask = (batch.tensors[name][row][kept].long()[None] for name in ("input_ids", "loss_mask"))
        images = dict(batch.non_tensor_batch["multi_modal_inputs"][row])
        if images:
            images |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
            images |= {"pixel_values": images["pixel_values"].flip(1)} if flipped else {}
        with torch.no_grad():
            log_probs = model(input_ids=ids, **images).logits[0, :-1].log_softmax(dim=-1)
        own = -log_probs.gather(1, ids[0, 1:, None])[:, 0] * mask[0, 1:]
        total, count = total + float(own.sum()), count + float(mask.sum())
    return total / count


def test_packed_and_padded_rows_with_images_have_the_loss_of_transformers(toy: Toy, tmp_path: Path) -> None:
    losses = {}
    for packed in (True, False):
        result, rows = train(config(toy, tmp_path / str(packed), **{f"{MODEL}.use_remove_padding": packed}))
        losses[packed] = [row["train/loss"] for row in rows if "train/loss" in row]
        assert result.validation["val/loss"] < rows[0]["val/loss"]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][0] == pytest.approx(loss_of_transformers(toy, tmp_path), rel=1e-5)
    assert abs(losses[True][0] - loss_of_transformers(toy, tmp_path, flipped=True)) > 1e-4


def test_megatron_is_refused_before_a_process_starts(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy=megatron trains models of text alone here; use fsdp2"):
        train(config(toy, tmp_path, **{f"{ACTOR}.strategy": "megatron"}))

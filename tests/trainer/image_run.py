"""Runs on prompts with images: the tiny vision-language model, and pictures of coloured squares."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from dovetail.data.files import prompt_row, write_rows
from tests.models.tiny import save_tiny_vision_model
from tests.trainer.toy_run import REWARD, Toy

COLOURS = ("red", "green", "blue", "yellow")
SIZES = ((16, 16), (17, 30), (25, 16))  # the last two are resized to whole patches
KEYS: dict[str, Any] = {
    "data.max_prompt_length": 64,
    "data.shuffle": False,  # every batch of four has prompts of all three kinds
    "actor_rollout_ref.model.trust_remote_code": True,
    "actor_rollout_ref.actor.optim.eps": 1e-3,
    # No divisor of a prompt's four answers, so that rows with and without images meet in a micro-batch.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3,
}


def save_image_toy(folder: Path, *, with_videos: bool = False) -> Toy:
    """Prompts with one image, two images and none, in turn; `with_videos` chooses the model's processor."""
    data = folder / "data"
    data.mkdir(parents=True)
    (data / "reward.py").write_text(REWARD)
    write_rows([_row(number) for number in range(12)], data / "train.parquet")
    write_rows([_row(number) for number in range(100, 104)], data / "val.parquet")
    return Toy(save_tiny_vision_model(folder / "model", with_videos=with_videos), data)


def _row(number: int) -> dict[str, Any]:
    count = (1, 2, 0)[number % 3]
    question = " or ".join([f"what {number}", *["<image>"] * count])
    row = prompt_row(data_source="toy", question=question, ground_truth="", ability="toy", extra_info={"index": number})
    return {**row, "images": [_square(number + other) for other in range(count)]}


def _square(number: int) -> dict[str, bytes]:
    """On white, as `datasets` stores an image."""
    image, file = Image.new("RGB", SIZES[number % len(SIZES)], "white"), io.BytesIO()
    image.paste(COLOURS[number % len(COLOURS)], (3, 2, 13, 12))
    image.save(file, "PNG")
    return {"bytes": file.getvalue()}

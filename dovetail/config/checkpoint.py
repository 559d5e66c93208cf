"""`*.checkpoint.*`: what a checkpoint of one role contains."""

from __future__ import annotations

from typing import Literal

from dovetail.config.base import Section, key

Content = Literal["model", "optimizer", "extra", "hf_model"]


class CheckpointConfig(Section):
    """Contents of saved and loaded checkpoints."""

    save_contents: list[Content] = key(
        ["model", "optimizer", "extra"],
        "What to save: sharded weights, optimizer state, schedule and RNG, a Hugging Face folder.",
    )
    load_contents: list[Content] | None = key(None, "What to load. Null: what was saved.")
    async_save: bool = key(False, "Write in the background while training goes on.")

"""`*.checkpoint.*`: what a checkpoint of one role contains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.base import Section

Content = Literal["model", "optimizer", "extra", "hf_model"]


class CheckpointConfig(Section):
    """Contents of saved and loaded checkpoints."""

    save_contents: list[Content] = Field(
        ["model", "optimizer", "extra"],
        description="What to save: sharded weights, optimizer state, schedule and RNG, a Hugging Face folder.",
    )
    load_contents: list[Content] | None = Field(None, description="What to load. Null: what was saved.")
    async_save: bool = Field(False, description="Write in the background while training goes on.")

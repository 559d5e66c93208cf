"""`data.*`: which prompts, how long, how many at a time."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dovetail.config.base import Section
from dovetail.config.home import HomePath


class CustomClassConfig(Section):
    """A user's class, by file and name."""

    path: HomePath | None = Field(
        None, description="Python file or `pkg://module` that defines the class. Null: built-in."
    )
    name: str | None = Field(None, description="Name of the class in that file.")


class SamplerConfig(Section):
    """A user's sampler (curriculum learning)."""

    class_path: HomePath | None = Field(
        None, description="Python file or `pkg://module` of the sampler. Null: built-in."
    )
    class_name: str | None = Field(None, description="Name of the sampler class.")


class DataConfig(Section):
    """Prompts for training and validation."""

    train_files: list[HomePath] | HomePath = Field(
        [], description="Training prompts: one parquet / jsonl path or a list; `hf://datasets/org/name/...` on the hub."
    )
    train_weights: list[float] | None = Field(
        None,
        description="Share of each file of `train_files` in every epoch, one number per file. Null: by their sizes.",
    )
    val_files: list[HomePath] | HomePath = Field(
        [], description="Validation prompts: one path or a list. Empty: no validation."
    )
    tokenizer: HomePath | None = Field(None, description="Tokenizer path. Null: the one of the model.")
    train_max_samples: int = Field(-1, ge=-1, description="Use at most this many training rows; -1 for all.")
    val_max_samples: int = Field(-1, ge=-1, description="Use at most this many validation rows; -1 for all.")
    prompt_key: str = Field("prompt", strict=True, min_length=1, description="Column that holds the chat messages.")
    reward_fn_key: str = Field(
        "data_source", strict=True, min_length=1, description="Column that selects the reward rule."
    )
    image_key: str = Field("images", strict=True, min_length=1, description="Column that holds the images of a prompt.")
    video_key: str = Field("videos", strict=True, min_length=1, description="Column that holds the videos of a prompt.")
    max_prompt_length: int = Field(512, ge=1, description="Longest prompt, in tokens; prompts are left-padded to it.")
    max_response_length: int = Field(512, ge=1, description="Longest response, in tokens.")
    train_batch_size: int = Field(1024, ge=1, description="Prompts per training step, over all devices.")
    gen_batch_size: int | None = Field(
        None,
        ge=1,
        description="Prompts generated at a time when groups are filtered (DAPO), over all devices. "
        "Null: `data.train_batch_size`.",
    )
    val_batch_size: int | None = Field(None, ge=1, description="Validation prompts at a time. Null: all at once.")
    shuffle: bool = Field(True, description="Shuffle the training rows, seeded by `data.seed`.")
    validation_shuffle: bool = Field(False, description="Shuffle the validation rows.")
    seed: int | None = Field(None, description="Seed of the data order. Null: `trainer.seed`.")
    dataloader_num_workers: int = Field(
        0, ge=0, description="Threads that make batches ahead, one each. 0: a batch is made when it is asked for."
    )
    filter_overlong_prompts: bool = Field(False, description="Drop prompts longer than `data.max_prompt_length`.")
    filter_overlong_prompts_workers: int | None = Field(
        None,
        ge=1,
        description="Processes that look at the rows before the first step. Null: one, several for large files.",
    )
    skip_bad_rows: bool = Field(
        False,
        description="Leave out rows that cannot be used (no prompt, no ground truth, too long with `truncation=error`, "
        "refused by the chat template) instead of stopping before the first step.",
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", description="What to do with a longer prompt: stop, or cut at this side."
    )
    return_raw_chat: bool = Field(True, description="Keep the chat messages in the batch (multi-turn needs them).")
    return_raw_input_ids: bool = Field(False, description="Keep the token ids before the chat template.")
    return_full_prompt: bool = Field(False, description="Keep the templated prompt text in the batch.")
    return_multi_modal_inputs: bool = Field(True, description="Keep processed image and video tensors in the batch.")
    image_patch_size: int = Field(14, ge=1, description="Patch edge of the vision tower, in pixels.")
    trust_remote_code: bool = Field(False, description="Let tokenizer and processor run code from the model folder.")
    tool_config_path: HomePath | None = Field(
        None, description="Tools shown in the chat template. Null: `rollout.multi_turn.tool_config_path`."
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Extra arguments of `apply_chat_template` (free-form)."
    )
    custom_cls: CustomClassConfig = Field(CustomClassConfig.model_construct(), description="A user's dataset class.")
    sampler: SamplerConfig = Field(SamplerConfig.model_construct(), description="A user's sampler.")

    @property
    def generation_batch_size(self) -> int:
        """Prompts generated at a time by dynamic sampling."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def train_paths(self) -> tuple[str, ...]:
        """Training files as a tuple, without empty names."""
        return _paths(self.train_files)

    @property
    def val_paths(self) -> tuple[str, ...]:
        """Validation files as a tuple, without empty names (`['']` means none)."""
        return _paths(self.val_files)


def _paths(files: list[str] | str) -> tuple[str, ...]:
    names = [files] if isinstance(files, str) else files
    return tuple(name for name in names if name)

"""`data.*`: which prompts, how long, how many at a time."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.config.base import HomePath, Section, key, read_with, section, unused, when_is


class CustomClassConfig(Section):
    """A user's class, by file and name."""

    rules = (unused("{section}.path names no file", when_is("path", None), only="name"),)

    path: HomePath | None = key(None, "Python file or `pkg://module` that defines the class. Null: built-in.")
    name: str | None = key(None, "Name of the class in that file.")


class SamplerConfig(Section):
    """A user's sampler (curriculum learning)."""

    rules = (unused("{section}.class_path names no file", when_is("class_path", None), only="class_name"),)

    class_path: HomePath | None = key(None, "Python file or `pkg://module` of the sampler. Null: built-in.")
    class_name: str | None = key(None, "Name of the sampler class.")


class DataConfig(Section):
    """Prompts for training and validation."""

    rules = (
        read_with("trainer.method", "sft", only="max_length"),
        read_with("algorithm.filter_groups.enable", True, only="gen_batch_size"),
        unused("the prompt's token ids are always in the batch, as `raw_prompt_ids`", only="return_raw_input_ids"),
        unused("the processor of the model knows its patch size", only="image_patch_size"),
        unused("`actor_rollout_ref.model.trust_remote_code` decides here too", only="trust_remote_code"),
    )

    train_files: list[HomePath] | HomePath = key(
        [], "Training prompts: one parquet / jsonl path or a list; `hf://datasets/org/name/...` on the hub."
    )
    train_weights: list[float] | None = key(None, "Share of each training file in every epoch. Null: by size.")
    val_files: list[HomePath] | HomePath | None = key(
        [], "Validation prompts: one path or a list. Empty or null: no validation."
    )
    tokenizer: HomePath | None = key(None, "Tokenizer path. Null: the one of the model.")
    train_max_samples: int = key(-1, "Use at most this many training rows; -1 for all.", was="max_samples", ge=-1)
    val_max_samples: int = key(-1, "Use at most this many validation rows; -1 for all.", ge=-1)
    prompt_key: str = key("prompt", "Column that holds the chat messages.", strict=True, min_length=1)
    reward_fn_key: str = key("data_source", "Column that selects the reward rule.", strict=True, min_length=1)
    image_key: str = key("images", "Column that holds the images of a prompt.", strict=True, min_length=1)
    video_key: str = key("videos", "Column that holds the videos of a prompt.", strict=True, min_length=1)
    max_prompt_length: int = key(512, "Longest prompt, in tokens; prompts are left-padded to it.", ge=1)
    max_response_length: int = key(512, "Longest response, in tokens.", ge=1)
    max_length: int | None = key(
        None, "Longest conversation of `trainer.method=sft`, in tokens. Null: prompt and response together.", ge=2
    )
    train_batch_size: int = key(1024, "Prompts per training step, over all devices.", ge=1)
    gen_batch_size: int | None = key(
        None, "Prompts generated at a time when groups are filtered (DAPO). Null: `data.train_batch_size`.", ge=1
    )
    val_batch_size: int | None = key(None, "Validation prompts at a time. Null: all at once.", ge=1)
    shuffle: bool = key(True, "Shuffle the training rows, seeded by `data.seed`.")
    validation_shuffle: bool = key(False, "Shuffle the validation rows.")
    seed: int | None = key(None, "Seed of the data order. Null: `trainer.seed`.")
    dataloader_num_workers: int = key(0, "Threads that make batches ahead. 0: they are made when asked for.", ge=0)
    filter_overlong_prompts: bool = key(False, "Drop prompts longer than `data.max_prompt_length`.")
    filter_overlong_prompts_workers: int | None = key(
        None, "Processes that look at the rows before the first step. Null: one, several for large files.", ge=1
    )
    skip_bad_rows: bool = key(
        False,
        "Leave out rows that cannot be used (no prompt, no ground truth, too long with `truncation=error`, "
        "refused by the chat template) instead of stopping before the first step.",
    )
    truncation: Literal["error", "left", "right", "middle"] = key("error", "A longer prompt: stop, or cut here.")
    return_raw_chat: bool = key(True, "Keep the chat messages in the batch (multi-turn needs them).")
    return_raw_input_ids: bool = key(False, "Keep the token ids before the chat template.")
    return_full_prompt: bool = key(False, "Keep the templated prompt text in the batch.")
    return_multi_modal_inputs: bool = key(True, "Keep processed image and video tensors in the batch.")
    image_patch_size: int = key(14, "Patch edge of the vision tower, in pixels.", ge=1)
    trust_remote_code: bool = key(False, "Let tokenizer and processor run code from the model folder.")
    tool_config_path: HomePath | None = key(None, "Tools shown in the chat template. Null: those of `multi_turn`.")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments of `apply_chat_template`.")
    mm_processor_kwargs: dict[str, Any] = key(
        {}, "Extra arguments of the model's processor of images and videos, such as `max_pixels`."
    )
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    sampler: SamplerConfig = section(SamplerConfig)

    @property
    def generation_batch_size(self) -> int:
        """Prompts generated at a time by dynamic sampling."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def longest(self) -> int:
        """Longest row of a training batch, in tokens."""
        return self.max_length or self.max_prompt_length + self.max_response_length

    @property
    def train_paths(self) -> tuple[str, ...]:
        """Training files as a tuple, without empty names."""
        return _paths(self.train_files)

    @property
    def val_paths(self) -> tuple[str, ...]:
        """Validation files as a tuple, without empty names (`['']` means none)."""
        return _paths(self.val_files)


def _paths(files: list[str] | str | None) -> tuple[str, ...]:
    names = [files] if isinstance(files, str) else files or []
    return tuple(name for name in names if name)

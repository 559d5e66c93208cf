"""`sft.*`: where fine-tuning finds a conversation in a row, and what validation shows. Model, optimizer and batches
have their own sections."""

from __future__ import annotations

from dovetail.config.base import Section, key, unused, when_is


class SFTConfig(Section):
    """Columns of the conversations of `trainer.method=sft`, and samples of validation."""

    rules = (unused("validation generates no answer", when_is("num_val_samples", 0), only="val_sample_tokens"),)

    messages_key: str = key("messages", "Column that holds a list of messages.", min_length=1)
    tools_key: str = key("tools", "Column that holds the tools of a conversation, a list or JSON.", min_length=1)
    response_key: str = key(
        "response",
        "Column that holds the answer to `data.prompt_key`, in rows without messages: text or messages.",
        min_length=1,
    )
    val_samples: int | None = key(
        None,
        "Conversations of `data.val_files` whose first answer is generated at each validation, for people to read. "
        "Null: 4 where the embedded engine reads the trained weights in place (one process, no adapters, no Megatron), "
        "else none.",
        ge=0,
    )
    val_sample_tokens: int = key(128, "Longest such answer, in tokens.", ge=1)
    prompt_dict_keys: list[str] = key([], "Keys inside the prompt's column, where it holds a dict.")
    response_dict_keys: list[str] = key([], "Keys inside the response's column, where it holds a dict.")

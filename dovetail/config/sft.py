"""`sft.*`: where fine-tuning finds a conversation in a row. Model, optimizer and batches have their own sections."""

from __future__ import annotations

from dovetail.config.base import Section, key


class SFTConfig(Section):
    """Columns of the conversations of `trainer.method=sft`."""

    messages_key: str = key("messages", "Column that holds a list of messages.", min_length=1)
    tools_key: str = key("tools", "Column that holds the tools of a conversation, a list or JSON.", min_length=1)
    response_key: str = key(
        "response",
        "Column that holds the answer to `data.prompt_key`, in rows without messages: text or messages.",
        min_length=1,
    )
    prompt_dict_keys: list[str] = key([], "Keys inside the prompt's column, where it holds a dict.")
    response_dict_keys: list[str] = key([], "Keys inside the response's column, where it holds a dict.")

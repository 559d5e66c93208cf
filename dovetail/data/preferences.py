"""`PreferenceDataset`: pairs of responses, or responses labelled one by one, as token ids with a mask.

A row has `chosen` and `rejected`, each text or messages, and `prompt` (text or messages); without a prompt, it is what
both begin with. A labelled row has `prompt`, `completion` and `label`. Optional: `margin`, `tools`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dovetail.data.conversations import TokenRow, checked_messages, checked_tools
from dovetail.data.encode import Messages, truncate
from dovetail.data.errors import DataError
from dovetail.data.examples import ExampleDataset, Renderer, TooLong, pad_rows
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response; their masks are 1 where the model writes."""

    prompt: list[int]
    chosen: TokenRow
    rejected: TokenRow
    margin: float = 0.0


@dataclass(frozen=True)
class Labelled:
    """A prompt with a response that is good, or bad."""

    prompt: list[int]
    response: TokenRow
    desirable: bool


class PreferenceDataset(ExampleDataset[Pair | Labelled]):
    """Pairs, or labelled responses (`labelled=True`), of one or more files. A pair makes two labelled responses."""

    def __init__(self, *source: Any, labelled: bool = False, **which: int) -> None:
        """`source` and `which` as for `ExampleDataset`."""
        self._labelled = labelled
        super().__init__(*source, **which)

    def encode(self, row: Mapping[str, Any]) -> Iterator[Pair | Labelled]:
        if not self._labelled:
            yield self._pair(row)
        elif row.get("chosen") is not None and row.get("label") is None:
            pair = self._pair(row)
            yield Labelled(pair.prompt, pair.chosen, True)
            yield Labelled(pair.prompt, pair.rejected, False)
        else:
            yield self._labelled_response(row)

    def batch(self, indices: Sequence[int] | np.ndarray) -> DataProto:
        """Two rows an example: a pair's chosen and rejected, or a labelled response and the same prompt with the
        response to another one, from which the KL baseline is estimated."""
        rows: list[tuple[list[int], TokenRow]] = []
        for index in indices:
            example = self._examples[int(index)]
            if isinstance(example, Pair):
                rows += [(example.prompt, example.chosen), (example.prompt, example.rejected)]
            else:
                rows += [(example.prompt, example.response), (example.prompt, self._unrelated_response(int(index)))]
        examples = [self._examples[int(index)] for index in indices for _ in range(2)]
        labels = [row % 2 == 0 if isinstance(one, Pair) else one.desirable for row, one in enumerate(examples)]
        margins = [one.margin if isinstance(one, Pair) else 0.0 for one in examples]
        whole = [([*prompt, *own.ids], [*([0] * len(prompt)), *own.mask]) for prompt, own in rows]
        columns = pad_rows(whole, self._pad_id) | {"desirable": torch.tensor(labels), "margin": torch.tensor(margins)}
        return DataProto.from_dict(columns, {"index": np.repeat(np.asarray(indices, dtype=np.int64), 2)})

    def _unrelated_response(self, index: int) -> TokenRow:
        """The last response before this one that another prompt has: fixed, so that the reference's log-probs of it are
        computed once."""
        prompt = self._examples[index].prompt
        before = (self._examples[index - back] for back in range(1, len(self)))
        others = (one.response for one in before if isinstance(one, Labelled) and one.prompt != prompt)
        if (response := next(others, None)) is None:
            raise DataError("all rows have one prompt; KTO's KL baseline needs responses to another one.")
        return response

    def _pair(self, row: Mapping[str, Any]) -> Pair:
        prompt, chosen, rejected, is_plain = split_pair(row, self.config.prompt_key)
        margin = row.get("margin")
        if margin is not None and not (_is_number(margin) and math.isfinite(margin)):
            raise DataError(f"margin is {margin!r}; it must be a number.")
        tools = checked_tools(row.get("tools"))
        prompt_ids, first = self._encode(prompt, chosen, tools, "chosen", is_plain=is_plain)
        _, second = self._encode(prompt, rejected, tools, "rejected", is_plain=is_plain)
        if first == second:
            raise DataError("chosen and rejected are the same; a preference needs two responses.")
        return Pair(prompt_ids, first, second, float(margin or 0.0))

    def _labelled_response(self, row: Mapping[str, Any]) -> Labelled:
        label, prompt_key = row.get("label"), self.config.prompt_key
        if not isinstance(label, (bool, np.bool_)) and label not in (0, 1):
            raise DataError(f"label is {label!r}; it must be true (a good response) or false.")
        completion = _checked(row.get("completion"), "completion")
        if row.get(prompt_key) is not None:
            prompt = _checked(row[prompt_key], prompt_key)
        elif isinstance(completion, str) or len(completion) < 2:
            raise DataError(f"there is no {prompt_key}; give one beside completion.")
        else:
            prompt, completion = completion[:-1], completion[-1:]
        ids, response = self._encode(prompt, completion, checked_tools(row.get("tools")), "completion")
        return Labelled(ids, response, bool(label))

    def _encode(
        self, prompt: Messages | str, response: Messages | str, tools: Any, name: str, *, is_plain: bool = False
    ) -> tuple[list[int], TokenRow]:
        if isinstance(prompt, str) and isinstance(response, str) and (self._renderer is None or is_plain):
            return self._encode_text(prompt, response, name)
        if self._renderer is None:
            raise DataError(
                "it is a chat, but the tokenizer has no chat template; set "
                "actor_rollout_ref.model.custom_chat_template, or give prompt and responses as plain text."
            )
        messages = _as_messages(prompt, "user")
        follows = _without_prompt(_as_messages(response, "assistant"), messages)
        if not follows or follows[0]["role"] != "assistant" or follows[-1]["role"] != "assistant":
            roles = ", ".join(str(message["role"]) for message in follows) or "no message"
            raise DataError(f"{name} is {roles} after the prompt; it must begin and end with a message of assistant.")
        try:
            prompt_ids = self._renderer.start(messages, tools)
            parts = list(_responses(self._renderer, messages, follows, tools))
        except DataError:
            raise
        except ValueError as error:  # ChatTemplateError: says what the template refuses
            raise DataError(str(error)) from error
        ids = [token for part, _ in parts for token in part]
        return self._fitted(prompt_ids, TokenRow(ids, [int(own) for part, own in parts for _ in part]), name)

    def _encode_text(self, prompt: str, response: str, name: str) -> tuple[list[int], TokenRow]:
        prompt_ids, ids = self._text_ids(prompt, response)
        return self._fitted(prompt_ids, TokenRow(ids, [1] * len(ids)), name)

    def _fitted(self, prompt: list[int], response: TokenRow, name: str) -> tuple[list[int], TokenRow]:
        config = self.config
        if not prompt:
            raise DataError("the prompt is empty; the first token of a response needs one before it.")
        limits = {"max_prompt_length": ("the prompt", prompt), "max_response_length": (name, response.ids)}
        for key, (what, ids) in limits.items():
            limit = getattr(config, key)
            if len(ids) > limit and (config.truncation == "error" or config.filter_overlong_prompts):
                raise TooLong(
                    f"{what} has {len(ids)} tokens, more than data.{key}={limit}; raise it to {len(ids)}, set "
                    "data.filter_overlong_prompts=True to leave such rows out, or data.truncation=left to cut."
                )
        kept = slice(config.max_response_length)
        prompt = truncate(prompt, config.max_prompt_length, config.truncation, "")
        return prompt, TokenRow(response.ids[kept], response.mask[kept])


class SplitPair(NamedTuple):
    """The parts of a row. `is_plain`: texts that share their beginning, which no chat template goes around."""

    prompt: Messages | str
    chosen: Messages | str
    rejected: Messages | str
    is_plain: bool


def split_pair(row: Mapping[str, Any], prompt_key: str = "prompt") -> SplitPair:
    """Prompt and responses; without a prompt, it is what both responses begin with."""
    if row.get("chosen") is None and row.get("rejected") is None:
        named = ", ".join(name for name in row if row[name] is not None) or "empty columns"
        hint = " Rows with completion and label are for dpo.loss_type=kto." if row.get("label") is not None else ""
        raise DataError(f"it has neither 'chosen' nor 'rejected', only {named}; both are text or messages.{hint}")
    chosen, rejected = (_checked(row.get(name), name) for name in ("chosen", "rejected"))
    if row.get(prompt_key) is not None:
        return SplitPair(_checked(row[prompt_key], prompt_key), chosen, rejected, False)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError("one of chosen and rejected is text and the other messages; give both alike.")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        # Not within a word, and a word keeps the space before it: tokenizers make one token of both.
        line = chosen.rfind("\n", 0, same) + 1
        same = max(chosen.rfind(" ", line, same), line) if line or " " in chosen[:same] else same
    if same == 0:
        unit = "text" if isinstance(chosen, str) else "messages"
        raise DataError(f"there is no {prompt_key}, and chosen and rejected begin with different {unit}.")
    return SplitPair(chosen[:same], chosen[same:], rejected[same:], isinstance(chosen, str))


def _responses(renderer: Renderer, prompt: Messages, follows: Messages, tools: Any) -> Iterator[tuple[list[int], bool]]:
    """Runs of tokens after the prompt, each with whether the model wrote it."""
    messages, rest = list(prompt), list(follows)
    while rest:
        messages.append(rest.pop(0))
        own = renderer.answer(messages, tools)
        yield own, True
        end = next((at for at, message in enumerate(rest) if message["role"] == "assistant"), 0)
        if not rest:
            return
        observed, rest = rest[:end], rest[end:]
        between = renderer.extend(messages, observed, closed=True, tools=tools, written=own) if observed else None
        if between is None:
            raise DataError(
                "the chat template rewrites what came before when this response goes on after its first message; give "
                "a response of one message, with the earlier ones in the prompt."
            )
        yield between, False
        messages += observed


def _without_prompt(response: Messages, prompt: Messages) -> Messages:
    """A response that repeats the prompt, as some data sets have it, is what comes after it."""
    questions = [message for message in prompt if message["role"] != "system"]
    for before in (prompt, questions):
        if before and len(response) > len(before) and response[: len(before)] == before:
            return response[len(before) :]
    return response


def _checked(value: Any, name: str) -> Messages | str:
    if isinstance(value, str) and value:
        return value
    if value is None:
        raise DataError(f"there is no {name}; it must be text or a list of messages with role and content.")
    try:
        return checked_messages([value] if isinstance(value, Mapping) else value, name)
    except DataError as error:
        raise DataError(str(error).replace("must be a list", "must be text or a list")) from None


def _as_messages(value: Messages | str, role: str) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)

"""Token ids to scoring processes, text made there. Torch-free: it runs inside the scoring processes.

A tokenizer of transformers that only wraps the `tokenizers` library is sent as that library's own definition, so that a
scoring process need not import transformers. Any other one is sent as it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT = "response_str"
"""In the columns a scoring process returns: the answer it has decoded."""

_WRAPPERS = "transformers.tokenization_utils_"


@dataclass(frozen=True)
class TokenIds:
    """An answer that is not decoded yet: int32 in this machine's byte order."""

    data: bytes

    def tolist(self) -> list[int]:
        return memoryview(self.data).cast("i").tolist()


@dataclass(frozen=True)
class DecoderSource:
    """What a scoring process makes its decoder of: a definition of the `tokenizers` library, or a pickled tokenizer."""

    definition: str | None = None
    pickled: bytes = b""

    def load(self) -> Callable[[TokenIds], str]:
        if self.definition is not None:
            from tokenizers import Tokenizer

            core = Tokenizer.from_str(self.definition)
            return lambda ids: core.decode(ids.tolist(), skip_special_tokens=True)
        tokenizer = pickle.loads(self.pickled)  # of the driver's own tokenizer, over the pipe that started this process
        return lambda ids: tokenizer.batch_decode([ids.tolist()], skip_special_tokens=True)[0]


def decoder_source(tokenizer: Any) -> DecoderSource | None:
    """How to send a tokenizer's decoding to another process; None when it cannot be sent."""
    if _only_wraps(tokenizer):
        return DecoderSource(definition=tokenizer.backend_tokenizer.to_str())
    try:
        return DecoderSource(pickled=pickle.dumps(tokenizer))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def decode_call(call: Mapping[str, Any], decode: Callable[[TokenIds], str]) -> tuple[dict[str, Any], list[str] | None]:
    """The call with text in place of token ids, and the texts; None when it came with text."""
    decoded, texts = dict(call), None
    if isinstance(call.get("solution_str"), TokenIds):
        decoded["solution_str"] = decode(call["solution_str"])
        texts = [decoded["solution_str"]]
    elif any(isinstance(answer, TokenIds) for answer in call.get("solution_strs", ())):
        decoded["solution_strs"] = texts = [decode(answer) for answer in call["solution_strs"]]
    return decoded, texts


def with_texts(value: Any, texts: Sequence[str] | None) -> Any:
    """What a call returned, with the text of each answer as one more column. Rows without a score stay as they are."""
    if texts is None:
        return value
    if isinstance(value, dict):
        return {**value, TEXT: texts[0]}
    return [{**row, TEXT: text} if isinstance(row, dict) else row for row, text in zip(value, texts, strict=True)]


def _only_wraps(tokenizer: Any) -> bool:
    """Whether decoding is the `tokenizers` library's alone: no method of a model's own, no spaces cleaned up."""
    kind, core = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    if core is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return False
    methods = (getattr(kind, name, None) for name in ("batch_decode", "decode", "_decode"))
    return all(getattr(method, "__module__", "").startswith(_WRAPPERS) for method in methods)

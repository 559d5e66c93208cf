"""longrope (Phi-3.5, Phi-4-mini): which of its two sets of frequencies a run computes with.

transformers takes the long set for a call in which some row is longer than the original context, else the short one, so
a row's log-probs would depend on the rows beside it. vLLM takes one set for all: the long one if a row may be that
long. So does a run here. Changes a config in memory; `as_in_folder` puts it back for saving.
"""

from __future__ import annotations

from typing import Any

_PARTS = ("factor", "mscale")


def use_one_set(config: Any, longest_row: int | None) -> None:
    """Call it before the network is built. Without `longest_row` the config stays as it is."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if longest_row is None or rope.get("rope_type") != "longrope" or longest_row <= _original_length(text):
        return
    text.rope_of_folder = rope
    text.rope_parameters = rope | {f"short_{part}": rope[f"long_{part}"] for part in _PARTS if f"long_{part}" in rope}


def as_in_folder(config: Any) -> None:
    """Undo `use_one_set`."""
    text = config.get_text_config()
    if hasattr(text, "rope_of_folder"):
        text.rope_parameters = text.rope_of_folder
        del text.rope_of_folder


def length_of_one_set(config: Any) -> int | None:
    """Up to how many tokens the rotary embedding is the same, where transformers makes it by the longest row of a call;
    None where it always is."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in ("dynamic", "longrope"):
        return None
    if kind == "longrope" and all(rope.get(f"short_{part}") == rope.get(f"long_{part}") for part in _PARTS):
        return None
    return _original_length(config)


def _original_length(config: Any) -> int:
    return config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings

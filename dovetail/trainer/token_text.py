"""Which characters of an answer each of its tokens stands for. Knows no model; needs only what tokens decode to."""

from __future__ import annotations

from collections.abc import Sequence

# What a tokenizer writes for bytes that are no character by themselves.
_BROKEN = "�"


def token_ends(text: str, pieces: Sequence[str]) -> list[int]:
    """Where each token ends in `text`; `pieces` are the tokens decoded one by one.

    Decoded alone a token may lose its leading space, be part of a character, or be special and absent from the text.
    Space goes to the token after it, a character of several tokens to the last of them, an absent token is empty.
    """
    ends: list[int] = []
    position, broken = 0, 0
    for piece in pieces:
        if _BROKEN in piece:
            broken += 1
            ends.append(position)
            continue
        found = _find(text, piece, position, broken) if piece else -1
        if found >= 0:
            if broken:
                ends[-1] = found
            position, broken = found + len(piece), 0
        ends.append(position)
    if broken:
        ends[-1] = len(text)
    return ends


def _find(text: str, piece: str, position: int, broken: int) -> int:
    # Each broken token before is at most one character; one more for a space that decoding alone has dropped.
    return text.find(piece, position, position + broken + 1 + len(piece))

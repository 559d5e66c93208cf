"""Which characters of an answer each of its tokens stands for. Knows no model; needs only what tokens decode to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

# What a tokenizer writes for bytes that are no character by themselves.
_BROKEN = "�"


def token_ends(text: str, pieces: Sequence[str]) -> list[int]:
    """Where each token ends in `text`; `pieces` are the tokens decoded one by one.

    Decoded alone a token may lose its leading space, be part of a character, or be special and absent from the text.
    Space goes to the token after it, a character of several tokens to the last of them, an absent token is empty.
    """
    if _BROKEN not in text and "".join(pieces) == text:
        return list(accumulate(map(len, pieces)))
    ends: list[int] = []
    position = 0
    least, most = 0, 0  # characters that broken tokens since `position` stand for
    for piece in pieces:
        if _BROKEN in piece:
            least = (least or 1) + len(piece.replace(_BROKEN, ""))
            most += len(piece)
            ends.append(position)
            continue
        # One more for a space that decoding alone has dropped.
        start = text.find(piece, position + least, position + most + 1 + len(piece)) if piece else -1
        if start >= 0:
            if most:
                ends[-1] = start
            position = start + len(piece)
            least, most = 0, 0
        ends.append(position)
    if most:
        ends[-1] = len(text)
    return ends

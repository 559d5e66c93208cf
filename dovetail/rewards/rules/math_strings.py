"""MATH: the last box of the solution against the truth as text, in the spelling that Hendrycks et al. defined.

Scores as verl does for the MATH data sets. Nothing is computed: `0.25` is not `1/4`. For values use the rule `math`.
"""

from __future__ import annotations

import re
from typing import Any

from dovetail.rewards.rules.extract import last_boxed

_REWRITTEN = (
    ("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", ""),
    (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""),
)  # fmt: skip
_UNIT = r"\text{ "
_INTEGERS = re.compile(r"(-?\d+)/(-?\d+)")


def compute_score(solution_str: str, ground_truth: Any, *, score: float = 1.0) -> dict[str, Any]:
    """`score` when the last box holds the truth, otherwise 0."""
    answer = boxed_answer(solution_str)
    truth = str(ground_truth)
    if r"\boxed" in truth:
        truth = last_boxed(truth) or truth
    right = answer is not None and same_spelling(answer, truth)
    return {"score": score if right else 0.0, "acc": float(right), "pred": answer or ""}


def boxed_answer(solution_str: str) -> str | None:
    """The content of the last `\\boxed{}`. `\\boxed 7$` wins over braces and reaches to the dollar."""
    if r"\boxed " in solution_str:
        return solution_str.rpartition(r"\boxed ")[2].partition("$")[0]
    box = solution_str[max(solution_str.rfind(r"\boxed"), 0) :]
    return balanced(box) if box.startswith(r"\boxed{") else None


def balanced(text: str) -> str | None:
    """What stands between the first brace and the one that closes it; None when it stays open."""
    depth, first = 0, 0
    for i, letter in enumerate(text):
        if letter == "{":
            first = first if depth else i + 1
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return text[first:i]
    return None


def same_spelling(left: str, right: str) -> bool:
    """Equal in normal spelling; equal as they stand where one of them has none."""
    try:
        return spell(left) == spell(right)
    except ValueError:
        return left == right


def spell(answer: str) -> str:
    """Blanks, sizes, units and percent signs gone; `\\frac{a}{b}` and `\\sqrt{a}` with braces. ValueError: no such."""
    text = answer
    for old, new in _REWRITTEN:
        text = text.replace(old, new)
    if text.count(_UNIT) > 1:
        raise ValueError(f"{answer!r} has several units")
    text = text.partition(_UNIT)[0].replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = f"0{text}" if text[0] == "." else text
    if text.count("=") == 1 and text.index("=") <= 2:
        text = text.partition("=")[2]
    text = _with_braces(text, r"\sqrt", 1).replace(" ", "")
    text = _with_braces(text, r"\frac", 2)
    if text == "0.5":
        return r"\frac{1}{2}"
    return _as_fraction(text)


def _with_braces(text: str, command: str, arguments: int) -> str:
    """`\\sqrt2` as `\\sqrt{2}`, `\\frac12` as `\\frac{1}{2}`; what has a brace already is left alone."""
    head, *pieces = text.split(command)
    written = [head]
    for piece in pieces:
        if not piece:
            raise ValueError(f"{command} without an argument")
        if piece[0] == "{":
            written.append(command + piece)
        elif len(piece) < arguments:
            return text
        else:
            given, rest = piece[:arguments], piece[arguments:]
            braced = "".join(letter if letter == "{" else f"{{{letter}}}" for letter in given)
            written.append(command + braced + rest)
    return "".join(written)


def _as_fraction(text: str) -> str:
    match = _INTEGERS.fullmatch(text)
    if match is None:
        return text
    top, bottom = (str(int(digits)) for digits in match.groups())
    return rf"\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text

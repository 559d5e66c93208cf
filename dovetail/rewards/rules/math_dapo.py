"""DAPO's mathematics: the last `Answer:` of the solution against the truth, +1 or -1. Scores as verl does.

Answers are compared as text, after the normalisation that Minerva published (Lewkowycz et al. 2022, appendix D.1):
`0.5` is not `1/2` here. For values use the rule `math`.
"""

from __future__ import annotations

import re
from typing import Any

_TAIL = 300
_STATED = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
# In this order: `a ` would otherwise be left over of `an `, and units are looked for once blanks are gone.
_REWRITTEN = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_MATH = re.compile(r".*?\$(.*?)\$.*")
_WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def compute_score(solution_str: str, ground_truth: Any, *, correct: float = 1.0, wrong: float = -1.0) -> dict[str, Any]:
    """`correct` when the last stated answer is the truth in normal spelling, otherwise `wrong`."""
    stated = _STATED.findall(solution_str[-_TAIL:])
    answer = normalize(stated[-1]) if stated else None
    right = answer is not None and answer == normalize(str(ground_truth))
    return {"score": correct if right else wrong, "acc": float(right), "pred": answer or ""}


def normalize(answer: str) -> str:
    """What stands after the last `=`, without blanks, units, text commands and dollar signs."""
    text = answer.rpartition("=")[2]
    for old, new in (*_REWRITTEN, *((word, "") for word in _DROPPED)):
        text = text.replace(old, new)
    text = _MATH.sub(r"$\1$", text)
    for wrapper in _WRAPPERS:
        text = wrapper.sub(r"\1", text)
    text = _BOX.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()

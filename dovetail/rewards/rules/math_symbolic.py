"""Mathematics with some algebra: the answer equals the truth as text, entry by entry, or as an expression.

`compute_score` scores as verl does for NuminaMath, `compute_geometry_score` as it does for Geometry3K (0.9 for the
answer, 0.1 for `<think>` and a box). Expressions are read by `expressions.py`, never run as Python.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dovetail.rewards.rules.expressions import number_of, same_expression
from dovetail.rewards.rules.latex_text import latex_to_text
from dovetail.rewards.rules.math_strings import balanced, spell

_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_LEADING = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=$|\D)")
_HARD = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
_FORMAT = re.compile(r"(?s)<think>.*</think>.*\\boxed\{.*\}.*")
_TOLERANCE = 1e-4


def compute_score(solution_str: str, ground_truth: Any, *, score: float = 1.0) -> dict[str, Any]:
    """`score` when the stated answer equals the truth, also within 0.01 % or as a percentage; otherwise 0."""
    answer, truth = stated_answer(solution_str), str(ground_truth)
    values_of_pi = (math.pi, 3.14) if r"\pi" in answer + truth else (math.pi,)
    right = grade(answer, truth, units=(*_UNITS, "liter")) or any(_close(answer, truth, pi) for pi in values_of_pi)
    return {"score": score if right else 0.0, "acc": float(right), "pred": answer}


def compute_geometry_score(solution_str: str, ground_truth: Any, *, format_score: float = 0.1) -> dict[str, Any]:
    """`1 - format_score` for the right box plus `format_score` for the form."""
    start = solution_str.rfind(r"\boxed{")
    answer = balanced(solution_str[start:]) if start >= 0 else None
    # A missing box reads "None", as the text that verl compares.
    right = grade("None" if answer is None else answer.strip(), str(ground_truth), tight=True)
    formed = bool(_FORMAT.fullmatch(solution_str))
    score = (1.0 - format_score) * right + format_score * formed
    return {"score": score, "acc": float(right), "pred": answer or ""}


def stated_answer(solution_str: str) -> str:
    """What the solution says its result is, by the words around it; the whole text when there are none."""
    text = solution_str
    for words in _BEFORE:
        text = _cut(text, words, after=True)
    for words in _AFTER:
        text = _cut(text, words, after=False)
    start = text.rfind(r"\boxed")
    if start < 0:
        start = text.rfind(r"\fbox")
    if start >= 0 and (box := balanced(text[start:])) and box.strip():
        text = box.strip()
    text = _cut(text, ". ", after=False)
    for words in _LEADING:
        text = _cut(text, words, after=True)
    return text


def grade(answer: str, truth: str, *, tight: bool = False, units: tuple[str, ...] = _UNITS) -> bool:
    """Equal as text, or entry by entry as expressions. `tight` drops blanks and braces first."""
    if _spelled(answer) == _spelled(truth):
        return True
    a, b = _plain(answer, units, tight), _plain(truth, units, tight)
    if a == b or not a:
        return a == b
    given, wanted = _entries(a), _entries(b)
    if len(given) != len(wanted) or (len(wanted) > 1 and (a[0], a[-1]) != (b[0], b[-1])):
        return False
    return bool(wanted) and all(_same_entry(x, y) for x, y in zip(given, wanted, strict=True))


def _cut(text: str, words: str, *, after: bool) -> str:
    place = text.lower().rfind(words)
    if place < 0:
        return text
    return (text[place + len(words) :] if after else text[:place]).strip()


def _spelled(answer: str) -> str:
    text = answer.strip()
    match = _TEXT.search(text)
    try:
        return spell(match.group(1).strip() if match else text)
    except ValueError:
        return match.group(1).strip() if match else text


def _plain(answer: str, units: tuple[str, ...], tight: bool) -> str:
    """LaTeX as one line of arithmetic, without units, percent and dollar signs, in lower case."""
    match = _TEXT.search(answer)
    text = match.group(1) if match else answer
    for old, new in ((r"\%", ""), (r"\$", ""), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        text = text.replace(old, new)
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in units:
        text = re.sub(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = _whole(re.sub(r",\\! *", "", text))
    if "\\" in text:
        text = latex_to_text(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4.
    if tight:
        text = text.replace(" ", "").replace("{", "").replace("}", "")
    text = text.lower()
    return _whole(text.replace(",", "")) if _is_whole(text) else text


def _whole(text: str) -> str:
    """`3.0` as `3`; other text as it is."""
    try:
        value = float(text)
    except ValueError:
        return text
    return str(round(value)) if math.isfinite(value) and abs(value - round(value)) <= 1e-7 else text


def _is_whole(text: str) -> bool:
    try:
        value = float(_without_thousands(text))
    except ValueError:
        return False
    return math.isfinite(value) and abs(value - round(value)) <= 1e-7


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def _entries(text: str) -> list[str]:
    text = _without_thousands(text)
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not re.search(r"[()\[\]]", text[1:-1]):
        return [entry.strip() for entry in text[1:-1].split(",")]
    return [text] if text else []


def _same_entry(given: str, wanted: str) -> bool:
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(wanted):
        return given == wanted  # A fraction that is not reduced is wrong.
    if _is_whole(given) != _is_whole(wanted):
        return False
    both = f"({wanted})-({given})"
    letters = {letter for letter in both.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    return len(letters) <= 2 and not _HARD.search(both) and same_expression(given, wanted)


def _close(answer: str, truth: str, pi: float) -> bool:
    """Equal as text or as numbers within the tolerance; a factor of 100 either way is a percentage."""
    given, wanted = _as_number(answer, pi), _as_number(truth, pi)
    if given.strip().lower() == wanted.strip().lower() or given.replace(" ", "") == wanted.replace(" ", ""):
        return True
    a, b = _number(given), _number(wanted)
    if a is not None and b is not None:
        return any(math.isclose(b * factor, a, rel_tol=_TOLERANCE) for factor in (0.01, 1, 100))
    given, wanted = given.strip(), wanted.strip()
    if not given or not wanted:
        return False
    if _without_brackets(given, wanted):
        return True
    in_brackets = given[0] in "([" and given[-1] in ")]" and (given[0], given[-1]) == (wanted[0], wanted[-1])
    if in_brackets and _all_close(given[1:-1], wanted[1:-1]):
        return True
    if "," in given and given.count(",") == wanted.count(","):
        return _all_close(given, wanted)
    return _same_value(given, wanted)


def _same_value(given: str, wanted: str) -> bool:
    if re.search(r"[\\^]", given + wanted):
        return False
    a, b = number_of(given), number_of(wanted)
    if a is not None and b is not None and math.isclose(a, b, rel_tol=_TOLERANCE):
        return True
    return same_expression(given, wanted)


def _all_close(given: str, wanted: str) -> bool:
    entries, truths = given.split(","), wanted.split(",")
    pairs = zip(entries, truths, strict=False)
    return len(entries) == len(truths) and all(_close(x.strip(), y.strip(), math.pi) for x, y in pairs)


def _without_brackets(given: str, wanted: str) -> bool:
    square = given[0] == "[" and given[-1] == "]" and wanted[0] != "("
    round_ = given[0] == "(" and given[-1] == ")" and wanted[0] != "["
    if square or round_:
        given, wanted = given.strip("[]()"), wanted.strip("[]()")
    return re.sub(r"[{}()]", "", given) == re.sub(r"[{}()]", "", wanted)


def _as_number(answer: str, pi: float) -> str:
    """Without a leading dollar, a closing percent sign, a base; with the value of pi where it stands."""
    if re.match(r"\$\d+(\.\d+)?", answer):
        return answer[1:]
    if re.fullmatch(r"\d+(\.\d+)?\\?%", answer):
        return answer.rstrip("\\%")
    base = re.fullmatch(r"\s*(-?\d+)(?:\.\d*)?\s*_.*", answer, re.DOTALL)
    answer = base.group(1) if base else answer
    if r"\pi" not in answer:
        return answer
    value = number_of(re.sub(r"(?<![0-9])\\pi", f"1*{pi}", answer).replace(r"\pi", f"*{pi}"))
    return answer if value is None else repr(value)


def _number(text: str) -> float | None:
    try:
        return float(text.replace("{,}", "").replace(",", ""))
    except ValueError:
        return None

"""LaTeX as one line of text: `\\frac{1}{2}` is `1/2`, `2\\sqrt{3}` is `2sqrt(3)`, unknown commands are dropped."""

from __future__ import annotations

import re
import unicodedata

_TOKEN = re.compile(r"\\[a-zA-Z]+\s*|\\.|[{}\[\]^]|[^\\{}\[\]^]", re.DOTALL)
_SYMBOLS = {
    "pi": "pi", "infty": "inf", "cup": "u", "cap": "∩", "cdot": "*", "times": "*", "div": "/", "pm": "±", "le": "≤",
    "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "angle": "∠", "in": "∈", "emptyset": "∅",
    "circ": "∘", "log": "log", "ln": "ln", "sin": "sin", "cos": "cos", "tan": "tan", "dots": "…", "ldots": "…",
    "quad": "  ", "to": "→", "rightarrow": "→", ",": " ", ";": " ", ":": " ", " ": " ", "\\": ";", "backslash": "\\",
}  # fmt: skip
_MATRIX = re.compile(r"\\begin\{[a-z]*matrix\}(.*?)\\end\{[a-z]*matrix\}", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*\}")
_ONE_FACTOR = re.compile(r"[\w.]*(?:sqrt\([^()]*\))?[\w.]*", re.DOTALL)


def latex_to_text(latex: str) -> str:
    """Braces only group; a fraction stands apart, so that `3\\frac12` can be a mixed number."""
    latex = latex.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\frac", r" \frac")
    latex = _MATRIX.sub(lambda match: f"[ {_rows(match.group(1))} ]", latex)
    return _Reader(_TOKEN.findall(_ENVIRONMENT.sub("", latex))).text().strip()


def _rows(body: str) -> str:
    rows = re.split(r"\\\\", body)
    return "; ".join(" ".join(entry.strip() for entry in row.split("&")) for row in rows if row.strip())


class _Reader:
    """Reads tokens from left to right; a command takes its arguments from the same stream."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    def text(self) -> str:
        pieces = []
        while self._tokens and (token := self._tokens.pop()) != "}":
            pieces.append(self._read(token))
        return "".join(pieces)

    def _read(self, token: str) -> str:
        if token == "{":
            return self.text()
        if token == "$":
            return ""
        if not token.startswith("\\") or len(token) == 1:
            return token
        name = token[1:].strip() or " "
        if name == "frac":
            return f"{self._factor()}/{self._factor()}"
        if name == "sqrt":
            return self._root()
        if len(name) == 1 and name in "{}%$&#_":
            return name
        return _SYMBOLS.get(name) or _greek(name)

    def _factor(self) -> str:
        # Brackets keep `\frac{x+1}{2}` from reading as x + 1/2.
        text = self._argument().strip()
        return text if _ONE_FACTOR.fullmatch(text) else f"({text})"

    def _argument(self) -> str:
        while self._tokens and self._tokens[-1].isspace():
            self._tokens.pop()
        return self._read(self._tokens.pop()) if self._tokens else ""

    def _root(self) -> str:
        if not self._tokens or self._tokens[-1] != "[":
            return f"sqrt({self._argument()})"
        degree = []
        self._tokens.pop()
        while self._tokens and (token := self._tokens.pop()) != "]":
            degree.append(token)
        return f"({self._argument()})^(1/{''.join(degree)})"


def _greek(name: str) -> str:
    case = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {case} LETTER {name.upper()}")
    except KeyError:
        return ""

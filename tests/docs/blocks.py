"""The code blocks of a page, and what its author says about running them.

A comment before a block says how it is run: `<!-- run: dry -->` (the command is looked at but not carried out: it would
install or need other machines), `<!-- run: check -->` (`dovetail train` for machines that are not here: its
configuration is checked), `<!-- exit: 2 -->` (it must fail like this). A block with a title is a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- (?P<key>run|exit): (?P<value>\w+) -->\n)?```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    title: str | None = None
    how: str = "run"
    exit_code: int = 0

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Lines of a shell block, joined where they go on."""
        joined = self.text.replace("\\\n", " ")
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        key, value = match["key"], match["value"]
        found.append(
            Block(
                page=page.name,
                line=text[: match.start()].count("\n") + 1,
                language=match["language"],
                text=match["text"],
                title=match["title"],
                how=value if key == "run" else "run",
                exit_code=int(value) if key == "exit" else 0,
            )
        )
    return found

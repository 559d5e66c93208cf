"""The commands of the reference pages and of the README: in shell blocks, before shown output, and in the text.

`page_command` hands one to a test elsewhere that has what it needs, such as servers that take long to start.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import Block, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]

_VARIABLE = re.compile(r"([A-Z_]+)=(\S*)")
_IN_TEXT = re.compile(r"`((?:dovetail|python -m|make) [^`\n]+)`")
REST_OF_KEYS = "..."
"""Stands on a page for the keys of the reader's own run."""


@dataclass(frozen=True)
class Command:
    """One command, without comments; `shown` is what the page says it prints."""

    place: str
    text: str
    shown: str = ""

    def __str__(self) -> str:
        return f"{self.place} {' '.join(self.words[:3])}"

    @property
    def words(self) -> list[str]:
        """Without the variables set before it."""
        words = shlex.split(self.text, comments=True)
        return words[len(self.environment) :]

    @property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for word in shlex.split(self.text, comments=True):
            match = _VARIABLE.fullmatch(word)
            if match is None:
                break
            found[match[1]] = match[2]
        return found

    @property
    def keys(self) -> dict[str, str]:
        """The `key=value` words of a `dovetail` command."""
        return dict(word.split("=", 1) for word in self.words[2:] if re.match(r"\w[\w.]*=", word))


def page_commands() -> list[Command]:
    """Every command of a block, in the order of the pages."""
    return [command for page in PAGES for block in blocks_of(page) for command in _of_block(block)]


def page_command(page: str, part: str) -> Command:
    """The one command of a page that contains these words."""
    found = [command for command in page_commands() if command.place.startswith(f"{page}:") and part in command.text]
    assert len(found) == 1, f"{page} has {len(found)} commands with {part!r}"
    return found[0]


def commands_in_text() -> list[Command]:
    """Commands between backquotes in sentences and tables; parts of them may be placeholders."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            found += [Command(f"{page.name}:{number}", match[1]) for match in _IN_TEXT.finditer(line)]
    return found


def _of_block(block: Block) -> Iterable[Command]:
    if block.language == "bash":
        yield from (Command(str(block), text) for text in block.commands())
    elif not block.language:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            text, _, shown = part.replace("\\\n", " ").partition("\n")
            yield Command(str(block), text, shown)

"""Read overrides (`a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`) from a command line or a launch list; tell them from files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.errors import Notice, Problem
from dovetail.config.root import DovetailConfig
from dovetail.config.translate.peers import USUAL_NAMES, usual_name
from dovetail.config.translate.short import SHORT_NAMES
from dovetail.config.values import is_quoted, parse_value, split_outside, unquote

_SET = re.compile(r"(\+\+|\+)?([A-Za-z_][\w\-@]*(?:\.[\w\-/@]+)*)\s*=(.*)", re.DOTALL)
_DELETE = re.compile(r"~([A-Za-z_][\w\-]*(?:\.[\w\-/@]+)*)(=.*)?", re.DOTALL)
# What is left of a launch script around its overrides.
_SCRIPT_WORDS = ("set ", "export ", "echo ", "cd ", "python", "ray job", "torchrun", "bash ", "sleep ", "#!")
# Hydra's options for the file of a run, and the files that come with verl: their defaults are in the schema.
_FILE_OPTIONS = ("--config-path", "--config-name", "--config-dir")
VERLS_OWN_FILE = re.compile(
    r"((fully_async|one_step_off|transfer_queue)_)?(ppo|dapo)_(megatron_)?trainer|sft_trainer\w*|legacy_reward_impl"
)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# What only a shell can fill in: `$NAME` that is not in the environment, `${NAME:-default}`, `$(command)`. A name with
# dots, `${data.seed}`, is an interpolation.
_OF_SHELL = re.compile(r"\$(?:[A-Za-z_(]|\{\w+(?:\}|:?[-=?+]))")
_ARGUMENTS_OF_CALLER = {"$@", '"$@"', "${@}", '"${@}"', "\\", "&&", "--"}


@dataclass(frozen=True)
class Override:
    """One override. `delete` takes a key back to its default."""

    key: str
    value: Any
    source: str
    delete: bool = False


@dataclass
class ParsedOverrides:
    """Overrides in order, with what could not be read."""

    overrides: list[Override]
    problems: list[Problem]
    notices: list[Notice]
    files: list[Path] = field(default_factory=list)
    """YAML files that come before the overrides: those of `--config-path` and `--config-name`."""


def split_arguments(items: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files (with `~` expanded) and overrides, each in the order given.

    `~/a.yaml`, `runs/lr=1/a.yaml` and an existing `lr=1.yaml` are files; `a.b=c`, `+a.b=c`, `~a.b` and `--option` are
    overrides.
    """
    items = _join_options(items)
    files = [item for item in items if _is_file(item)]
    return [Path(os.path.expanduser(item)) for item in files], [item for item in items if not _is_file(item)]


def sets_known_key(text: str) -> bool:
    """Whether a text that may be anything else, such as a prompt, is an override of a key that a section or a short
    name has. Code and equations have spaces around the sign, or several lines."""
    match = _SET.fullmatch(text)
    if match is None or "\n" in text or re.search(r"\s=|=\s", text):
        return False
    section, has_dot, _ = match[2].partition(".")
    return section in DovetailConfig.model_fields if has_dot else section in {*SHORT_NAMES, *USUAL_NAMES}


def parse_overrides(texts: Sequence[str], *, source: str, shell_quotes: bool = False) -> ParsedOverrides:
    """Read one override per text. With `shell_quotes`, quotes around a whole value are a shell's and are taken off."""
    parsed = ParsedOverrides([], [], [])
    options: dict[str, str] = {}
    for text in map(str.strip, _join_options(texts)):
        if text.startswith("--"):
            name, _, value = text.partition("=")
            options[name] = unquote(value) if is_quoted(value) else value
            if usual := usual_name(name.removeprefix("--")):
                parsed.problems.append(Problem(text, f"{text} is not a known key{usual}"))
            elif name not in _FILE_OPTIONS:
                parsed.notices.append(Notice(text, f"{text} is an option of another launcher; it is not read."))
            continue
        try:
            parsed.overrides.append(_parse(text, source, shell_quotes))
        except ValueError as error:
            parsed.problems.append(Problem(text, f"{text!r} cannot be read as an override: {error}."))
    if "--config-name" in options:
        _add_file(parsed, options, source)
    return parsed


def _add_file(parsed: ParsedOverrides, options: dict[str, str], source: str) -> None:
    name = options["--config-name"].removesuffix(".yaml")
    if "megatron" in name:
        # What such a file is chosen for. Laid first, so that any explicit strategy wins.
        parsed.overrides.insert(0, Override("actor_rollout_ref.actor.strategy", "megatron", source))
    file = Path(os.path.expanduser(options.get("--config-path", options.get("--config-dir", ".")))) / f"{name}.yaml"
    option = f"--config-name={name}"
    if VERLS_OWN_FILE.fullmatch(name):
        parsed.notices.append(Notice(option, f"{option} selects a file of another launcher; it is not read."))
    elif file.is_file():
        parsed.files.append(file)
    else:
        message = f"{option}: {file} is not a file; give the file's folder as --config-path=FOLDER."
        parsed.problems.append(Problem(option, message))


def read_overrides_file(path: Path) -> ParsedOverrides:
    """Read a launch list: one override per line, `#` comments, and what survives of a shell script around it.

    Variables of the environment are filled in, as in `$HOME/data`.
    """
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        texts.extend(_overrides_of_line(line))
    texts = [_VARIABLE.sub(lambda match: os.environ.get(match[1] or match[2], match[0]), text) for text in texts]
    if unfilled := next((text for text in texts if _OF_SHELL.search(text)), None):
        message = (
            f"{path}: {unfilled!r} has a variable that only a shell can fill in. Let one write the list: "
            f'bash -c \'python3() {{ [ "$1" = -m ] && printf "%s\\n" "${{@:3}}" > launch.txt; }}; . {path}\', '
            "then give launch.txt (more in docs/guide/from-verl.md)."
        )
        return ParsedOverrides([], [Problem(str(path), message)], [])
    return parse_overrides(texts, source=str(path), shell_quotes=True)


def _is_file(item: str) -> bool:
    if item.startswith(("+", "--")):
        return False
    if item.endswith((".yaml", ".yml")) and os.path.isfile(os.path.expanduser(item)):
        return True
    name, is_assignment, _ = item.partition("=")
    if is_assignment:
        return "/" in name or os.sep in name
    return not item.startswith("~") or "/" in item


def _parse(text: str, source: str, shell_quotes: bool) -> Override:
    if match := _DELETE.fullmatch(text):
        return Override(match[1], None, source, delete=True)
    match = _SET.fullmatch(text)
    if match is None:
        raise ValueError("write key=value, +key=value, ++key=value or ~key")
    value = match[3].strip()
    if shell_quotes and is_quoted(value):
        value = unquote(value)
    return Override(match[2], parse_value(value), source)


def _overrides_of_line(line: str) -> list[str]:
    line = line.strip().rstrip("\\").rstrip()
    if not line or line.startswith("#"):
        return []
    # A quoted word holds a whole override in scripts that protect brackets from the shell: '+a.b=[1,2]'.
    words = _join_options([unquote(word) if is_quoted(word) else word for word in _words(line)])
    texts: list[str] = []
    for word in words:
        if word.startswith("#"):
            break
        if word in _ARGUMENTS_OF_CALLER:
            continue
        if _SET.fullmatch(word) or _DELETE.fullmatch(word) or word.startswith("--"):
            texts.append(word)
        elif texts and not texts[-1].startswith("--"):
            # Not an override of its own: a value with a space in it.
            texts[-1] += f" {word}"
        elif not line.startswith(_SCRIPT_WORDS):
            texts.append(word)
    return [] if line.startswith(("set ", "export ", "echo ")) else texts


def _join_options(items: Sequence[str]) -> list[str]:
    """`--config-path FOLDER` as `--config-path=FOLDER`."""
    joined: list[str] = []
    for item in items:
        if joined and joined[-1] in _FILE_OPTIONS:
            joined[-1] += f"={item}"
        else:
            joined.append(item)
    return joined


def _words(line: str) -> list[str]:
    return [word for word in split_outside(line.replace("\t", " "), " ") if word]

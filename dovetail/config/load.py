"""Read files and overrides into one typed configuration. All mistakes are reported at once.

Order, later wins: YAML files, launch lists, overrides. Checks that relate several keys are in `dovetail.config.checks`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.errors import ConfigError, Notice, Problem, name_some
from dovetail.config.files import read_yaml, resolve_interpolations
from dovetail.config.idle import idle_notices, is_unread
from dovetail.config.keys import catalogue, find_key, sections
from dovetail.config.no_effect import UNUSED_BY_ROLE, NoEffect, no_effect
from dovetail.config.overrides import Override, parse_overrides, read_overrides_file
from dovetail.config.pending import pending_notices
from dovetail.config.root import DovetailConfig
from dovetail.config.runnable import unsupported_in_runs
from dovetail.config.translate import translate
from dovetail.config.tree import Tree, leaves, merge, put, remove
from dovetail.config.validate import build, default_tree, suggestion, unknown_keys


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with what its author should know about it."""

    config: DovetailConfig
    notices: tuple[Notice, ...]
    tree: Tree
    """What was set, in today's spelling, without defaults."""
    sources: dict[str, str]
    """Where each set key comes from: a file, or `override`."""


def load_config(
    files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    overrides_files: Sequence[Path | str] = (),
) -> LoadedConfig:
    """Build the configuration. Raises `ConfigError` with every problem found."""
    draft = _Draft()
    for file in files:
        draft.lay_file(Path(file))
    for file in overrides_files:
        draft.lay_overrides_file(Path(file))
    draft.lay_overrides(overrides)
    return draft.finish()


class _Draft:
    """The tree while it is put together, with the problems and notices so far."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.notices: list[Notice] = []
        self.unset: dict[str, str] = {}
        """Keys that a file leaves open (`???`), with the file."""

    def lay_file(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        try:
            loaded = read_yaml(path)
        except ValueError as error:
            self.problems.append(Problem(str(path), f"{error}."))
            return
        merge(self.tree, loaded)
        self.sources |= {key: str(path) for key, _ in leaves(loaded)}

    def lay_overrides_file(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        if not path.is_file():
            self.problems.append(Problem(str(path), f"{path} is not a file; pass the path of a launch list."))
            return
        try:
            parsed = read_overrides_file(path)
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(Problem(str(path), f"{path} cannot be read as a launch list: {error}."))
            return
        self._lay(parsed.overrides)
        self.problems += parsed.problems
        self.notices += parsed.notices

    def lay_overrides(self, texts: Sequence[str]) -> None:
        parsed = parse_overrides(texts, source="override")
        self._lay(parsed.overrides)
        self.problems += parsed.problems
        self.notices += parsed.notices

    def finish(self) -> LoadedConfig:
        values = self._resolved()
        translated = translate(values)
        self.notices += translated.notices
        self.problems += translated.problems
        kept = self._without_nulls(self._without_idle(translated.leaves))
        unknown = unknown_keys(kept)
        self.problems += unknown
        wrong = {problem.key for problem in unknown}
        config, problems = build({key: value for key, value in kept.items() if key not in wrong})
        self.problems += [*problems, *self._left_open(config)]
        if config is None or self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        self._note_values(config, kept)
        tree: Tree = {}
        for key, value in kept.items():
            put(tree, key, value)
        sources = {key: self._source(translated.spelling.get(key, key)) for key in kept}
        return LoadedConfig(config, tuple(dict.fromkeys(self.notices)), tree, sources)

    def _left_open(self, config: DovetailConfig | None) -> list[Problem]:
        """A key that is `???` must be set, unless this run does not read it."""
        problems: list[Problem] = []
        for key, file in self.unset.items():
            names = list(translate({key: None}).leaves) or [key]
            if all(no_effect(name) for name in (key, *names)) or (
                config is not None and all(is_unread(config, name) for name in names)
            ):
                continue
            problems.append(Problem(key, f"{key} is ??? in {file}: it must be set."))
        return problems

    def _lay(self, overrides: Sequence[Override]) -> None:
        for override in overrides:
            if override.delete:
                self._delete(override.key)
                continue
            try:
                put(self.tree, override.key, override.value)
            except ValueError as error:
                self.problems.append(Problem(override.key, f"{override.key}: {error}."))
            self.sources[override.key] = override.source

    def _delete(self, key: str) -> None:
        known = find_key(DovetailConfig, key) is not None or key in sections(DovetailConfig)
        if not remove(self.tree, key) and not known:
            self.problems.append(Problem(key, f"~{key}: there is no such key to remove{suggestion(key)}"))

    def _resolved(self) -> dict[str, Any]:
        resolved, problems = resolve_interpolations(self.tree, default_tree)
        self.problems += problems
        values = dict(leaves(resolved))
        targets = [key for key in values if key.rpartition(".")[2] == "_target_"]
        if targets:
            message = (
                f"{len(targets)} _target_ keys have no effect here: sections are typed, no class is named in a file."
            )
            self.notices.append(Notice(targets[0], message))
            values = {key: value for key, value in values.items() if key not in targets}
        for key in [key for key, value in values.items() if value == "???"]:
            self.unset[key] = self._source(key)
            del values[key]
        return values

    def _without_idle(self, values: dict[str, Any]) -> dict[str, Any]:
        """Drop the keys that have no effect here, with one notice for each reason."""
        kept: dict[str, Any] = {}
        idle: dict[NoEffect, list[str]] = {}
        for key, value in values.items():
            entry = None if find_key(DovetailConfig, key) else no_effect(key)
            if entry is None:
                kept[key] = value
            elif entry.refuses(value):
                self.problems.append(Problem(key, f"{key}={value} is not supported: {entry.reason}; take the key out."))
            elif value is not None:
                idle.setdefault(entry, []).append(f"{key}={value}")
        for entry, keys in idle.items():
            message = f"{name_some(keys)}: no effect here, because {entry.reason}."
            self.notices.append(Notice(keys[0].partition("=")[0], message))
        return kept

    def _without_nulls(self, values: dict[str, Any]) -> dict[str, Any]:
        """Null where null is no value means "not set"."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            known = catalogue(DovetailConfig).get(key)
            if known is not None and value in ("None", "null") and not known.accepts(str):
                value = None  # Python's spelling, in a YAML file
            if value is not None or known is None or known.accepts(type(None)) or known.inherits:
                kept[key] = value
            else:
                self.notices.append(Notice(key, f"{key}=null is read as its default, {known.default}."))
        return kept

    def _note_values(self, config: DovetailConfig, values: dict[str, Any]) -> None:
        for key, reason in UNUSED_BY_ROLE.items():
            # A file that resolves a whole run writes every key: only a wish that is not fulfilled is worth a notice.
            default = catalogue(DovetailConfig)[key].default
            if values.get(key, default) not in (None, default):
                self.notices.append(Notice(key, f"{key}={values[key]} has no effect here, because {reason}."))
        refused = unsupported_in_runs(config)
        for problem in refused:
            self.notices.append(Notice(problem.key, f"{problem.message} It is planned all the same."))
        told = {problem.key for problem in refused} | UNUSED_BY_ROLE.keys()
        self.notices += pending_notices(config, values, told=told)
        self.notices += idle_notices(config, values, told=told)

    def _source(self, key: str) -> str:
        parts = key.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.sources[name] for name in names if name in self.sources), "override")

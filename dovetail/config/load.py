"""Read files and overrides into one typed configuration. All mistakes are reported at once.

Order, later wins: YAML files, launch lists, overrides. Checks that relate several keys are in `dovetail.config.checks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.adapter import fill_adapters
from dovetail.config.base import Rule
from dovetail.config.effects import effect_notices, is_unused
from dovetail.config.errors import ConfigError, Notice, Problem
from dovetail.config.files import read_yaml, resolve_interpolations
from dovetail.config.keys import catalogue, find_key, sections
from dovetail.config.overrides import VERLS_OWN_FILE, Override, ParsedOverrides, parse_overrides, read_overrides_file
from dovetail.config.root import DovetailConfig
from dovetail.config.translate import ROLES, chosen_file, chosen_groups, expand, foreign_key, translate
from dovetail.config.tree import Tree, leaves, merge, nested, prefixes, put, remove
from dovetail.config.validate import build, default_tree, suggestion, unknown_keys
from dovetail.config.values import parse_value
from dovetail.config.wording import name_some


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with what its author should know about it."""

    config: DovetailConfig
    notices: tuple[Notice, ...]
    tree: Tree
    """What was set, in today's spelling, without defaults."""
    sources: dict[str, str]
    """Where each set key comes from: a file, or `override`."""
    uses_short_names: bool = False
    """Whether a short name (`model=`, `data=`, `reward=`) was used."""
    choices: tuple[Notice, ...] = ()
    """What was chosen for open keys, and why."""

    @property
    def fits_open_keys(self) -> bool:
        """Whether `trainer.choose` fits every open key: with short names, and for methods other than RL, because the
        defaults of the keys are those of RL."""
        return self.uses_short_names or self.config.trainer.method != "rl"


def load_config(
    files: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    *,
    overrides_files: Sequence[Path | str] = (),
    values: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Build the configuration. Raises `ConfigError` with every problem found.

    `values` are Python's own: sections in sections, dotted keys, or both. They come last.
    """
    draft = _Draft()
    for file in files:
        draft.add_file(Path(file))
    for file in overrides_files:
        draft.add_overrides_file(Path(file))
    draft.take(parse_overrides(overrides, source="override"))
    draft.add([Override(name, value, "Python") for name, value in (values or {}).items()])
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
        self.uses_short_names = False

    def add_file(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        try:
            loaded = read_yaml(path)
        except ValueError as error:
            self.problems.append(Problem(str(path), f"{error}."))
            return
        defaults = loaded.pop("defaults", None) or []
        for base in defaults if isinstance(defaults, list) else [defaults]:
            self._add_default(base, path)
        merge(self.tree, {name: value for name, value in loaded.items() if expand(name, value) is None})
        self.sources |= {key: str(path) for key, _ in leaves(loaded)}
        self.add([Override(name, value, str(path)) for name, value in loaded.items() if expand(name, value)])

    def _add_default(self, base: Any, path: Path) -> None:
        """An entry of Hydra's list `defaults` in the file `path`."""
        if isinstance(base, Mapping):
            self.add([Override(name, value, str(path)) for name, value in chosen_groups(base)])
            return
        file = path.parent / f"{str(base).removesuffix('.yaml')}.yaml"
        if base == "_self_" or file == path:
            return
        if VERLS_OWN_FILE.fullmatch(file.stem):  # the schema's defaults
            message = f"{path}: {base} in its defaults is a file of another launcher; it is not read."
            self.notices.append(Notice("defaults", message))
        elif file.is_file():
            self.add_file(file)
        else:
            message = f"{path}: {base} is in its defaults, and {file} is not a file; write the file, or take it out."
            self.problems.append(Problem("defaults", message))

    def add_overrides_file(self, path: Path) -> None:
        path = Path(os.path.expanduser(path))
        if not path.is_file():
            self.problems.append(Problem(str(path), f"{path} is not a file; pass the path of a launch list."))
            return
        try:
            parsed = read_overrides_file(path)
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(Problem(str(path), f"{path} cannot be read as a launch list: {error}."))
            return
        self.take(parsed)

    def take(self, parsed: ParsedOverrides) -> None:
        for file in parsed.files:
            self.add_file(file)
        self.add(parsed.overrides)
        self.problems += parsed.problems
        self.notices += parsed.notices

    def finish(self) -> LoadedConfig:
        values = self._resolved()
        translated = translate(values)
        self.notices += translated.notices
        self.problems += translated.problems
        kept = self._without_nulls(self._without_foreign(translated.leaves))
        self.notices += fill_adapters(kept)
        unknown = unknown_keys(kept, translated.spelling)
        self.problems += unknown
        wrong = {problem.key for problem in unknown}
        config, problems = build({key: value for key, value in kept.items() if key not in wrong})
        self.problems += [*problems, *self._left_open(config)]
        if config is None or self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        self.notices += effect_notices(config, kept)
        sources = {key: self._source(translated.spelling.get(key, key)) for key in kept}
        return LoadedConfig(config, tuple(dict.fromkeys(self.notices)), nested(kept), sources, self.uses_short_names)

    def _left_open(self, config: DovetailConfig | None) -> list[Problem]:
        """A key that is `???` must be set, unless this run does not read it."""
        problems: list[Problem] = []
        for key, file in self.unset.items():
            names = list(translate({key: None}).leaves) or [key]
            if all(foreign_key(name) for name in (key, *names)) or (
                config is not None and all(is_unused(config, name) for name in names)
            ):
                continue
            problems.append(Problem(key, f"{key} is ??? in {file}: it must be set."))
        return problems

    def add(self, overrides: Sequence[Override]) -> None:
        for override in overrides:
            if override.delete:
                self._delete(override.key)
                continue
            keys = expand(override.key, override.value)
            self.uses_short_names |= keys is not None and chosen_file(override.key, override.value) is None
            for key, value in ({_key_of(override): override.value} if keys is None else keys).items():
                try:
                    put(self.tree, key, value)
                except ValueError as error:
                    self.problems.append(Problem(key, f"{key}: {error}."))
                self.sources[key] = override.source

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

    def _without_foreign(self, values: dict[str, Any]) -> dict[str, Any]:
        """Drop the keys of other systems, with one notice for each reason."""
        kept: dict[str, Any] = {}
        unused: dict[Rule, list[str]] = {}
        for key, value in values.items():
            rule = None if find_key(DovetailConfig, key) else foreign_key(key)
            if rule is None:
                kept[key] = value
            elif rule.outcome == "unsupported" and value is not None and value not in rule.unless:
                self.problems.append(Problem(key, f"{key}={value} is not supported: {rule.why}; take the key out."))
            elif value is not None:
                unused.setdefault(rule, []).append(f"{key}={value}")
        for rule, keys in unused.items():
            message = f"{name_some(keys)}: no effect here, because {rule.why}."
            self.notices.append(Notice(keys[0].partition("=")[0], message))
        return kept

    def _without_nulls(self, values: dict[str, Any]) -> dict[str, Any]:
        """Null where null is no value means "not set"."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            known = catalogue(DovetailConfig).get(key)
            if known is not None and value in ("None", "null") and not known.accepts(str):
                value = None  # Python's spelling, in a YAML file
            if known is not None and isinstance(value, str) and value.startswith("[") and not known.accepts(str):
                value = parse_value(value)  # a list in quotes that the shell has left
            if value is not None or known is None or known.accepts(type(None)) or known.inherits:
                kept[key] = value
            else:
                self.notices.append(Notice(key, f"{key}=null is read as its default, {known.default}."))
        return kept

    def _source(self, key: str) -> str:
        return next((self.sources[name] for name in prefixes(key) if name in self.sources), "override")


def _key_of(override: Override) -> str:
    """The key of an override, also where it gives a section one value: true and false are its switch, and a name for
    that of a role is Hydra's choice of a file (`actor@SECTION=NAME`)."""
    key = override.key
    if isinstance(override.value, bool) and key in sections(DovetailConfig):
        return switch if (switch := f"{key}.enable") in catalogue(DovetailConfig) else key
    return f"{key.rpartition('.')[2]}@{key}" if isinstance(override.value, str) and key in ROLES else key

"""Read YAML files and resolve `${...}` interpolations with OmegaConf, which is imported only when needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.config.errors import Problem
from dovetail.config.tree import Tree, merge, remove
from dovetail.config.wording import nearest


def read_yaml(path: Path) -> Tree:
    """The mapping in one YAML file, interpolations not yet resolved. Raises ValueError with the file's name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if path.is_dir():
        meant = path / "config.yaml" if (path / "config.yaml").is_file() else f"model={path}"
        raise ValueError(f"{path} is a folder; did you mean {meant}?")
    if path.suffix in (".jsonl", ".parquet"):  # JSON reads as YAML
        raise ValueError(f"{path} is no YAML file; did you mean data={path}?")
    if not path.is_file():
        beside = [str(one) for one in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        meant = f" (did you mean {near}?)" if (near := nearest(path, beside)) else ""
        raise ValueError(f"{path} is not a file{meant}; pass the path of a YAML file, or an override as key=value")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = path.read_text(errors="replace").splitlines()[mark.line : mark.line + 1] if mark else []
        tab = "; the line begins with a tab, and YAML takes spaces alone" if line and "\t" in _indent(line[0]) else ""
        raise ValueError(f"{path} cannot be read as YAML: {error}{tab}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}; a configuration is a mapping of sections")
    # A launch list reads as YAML, too: as one long word that is set to nothing.
    if listed := next((str(name) for name, value in loaded.items() if value is None and "=" in str(name)), None):
        raise ValueError(
            f"{path} is a launch list ({listed[:40]!r} ...), not YAML; give it with --overrides-file {path}"
        )
    return {str(name): value for name, value in loaded.items()}


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def resolve_interpolations(tree: Tree, defaults: Callable[[], Tree]) -> tuple[Tree, list[Problem]]:
    """`tree` with every `${...}` replaced, and a problem for each key (taken out) that refers to nothing.

    Keys that the tree does not set are looked up in `defaults`.
    """
    problems: list[Problem] = []
    if not _has_interpolation(tree):
        return tree, problems
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    wanted: Tree = {}
    merge(wanted, tree)
    while True:
        whole = defaults()
        merge(whole, wanted)
        try:
            return _only(OmegaConf.to_container(OmegaConf.create(whole), resolve=True), wanted), problems
        except OmegaConfBaseException as error:
            key = str(getattr(error, "full_key", None) or "").partition("[")[0]
            reason = str(error).splitlines()[0]
            hint = "a shell variable must be replaced by its value, or written ${oc.env:NAME}"
            problems.append(Problem(key, f"{key}: the interpolation cannot be resolved ({reason}); {hint}."))
            # One failure hides the next, so look again without this key. A key that cannot be taken out ends it.
            if not remove(wanted, key):
                return {}, problems


def _has_interpolation(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(_has_interpolation(inner) for inner in value.values())
    return isinstance(value, list) and any(_has_interpolation(inner) for inner in value)


def _only(resolved: Any, wanted: Any) -> Any:
    """The part of `resolved` that has the keys of `wanted`."""
    if isinstance(wanted, dict) and isinstance(resolved, dict):
        return {name: _only(resolved[name], inner) for name, inner in wanted.items()}
    return resolved

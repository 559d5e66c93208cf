"""Nested mappings of plain values, as files and overrides give them. Knows no key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Tree = dict[str, Any]


def merge(below: Tree, above: Mapping[str, Any]) -> None:
    """Lay `above` over `below`, in place: mappings are merged, everything else is replaced."""
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(name), dict):
            merge(below[name], value)
        else:
            below[name] = _copied(value)


def put(tree: Tree, key: str, value: Any) -> None:
    """Set `key`, making sections on the way. A mapping is merged. Raises ValueError when a section is a plain value."""
    *parents, leaf = key.split(".")
    for depth, part in enumerate(parents):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{'.'.join(parents[: depth + 1])} is set to {tree!r}, so nothing can be set below it")
    if isinstance(value, Mapping) and isinstance(tree.get(leaf), dict):
        merge(tree[leaf], value)
    else:
        tree[leaf] = _copied(value)


def nested(values: Mapping[str, Any]) -> Tree:
    """The tree of these dotted keys."""
    tree: Tree = {}
    for key, value in values.items():
        put(tree, key, value)
    return tree


def get(tree: Tree, key: str, default: Any = None) -> Any:
    """The value or the section at `key`; `default` when it is not there."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return default
        node = node[part]
    return node


def remove(tree: Tree, key: str) -> bool:
    """Take `key` out; False when it is not there."""
    section, _, leaf = key.rpartition(".")
    node = get(tree, section) if section else tree
    return isinstance(node, dict) and node.pop(leaf, _MISSING) is not _MISSING


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that is not a section, with its value. An empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def prefixes(key: str) -> list[str]:
    """`key` and every section around it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _copied(value: Any) -> Any:
    if isinstance(value, BaseModel):  # a typed section carries defaults too; what its author set counts as set
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(name): _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list | tuple) else value


_MISSING = object()

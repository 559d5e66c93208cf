"""A section as code written for verl reads its configuration: attributes, items and `get`. Read only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.config.base import Section


class ConfigView(Mapping[str, Any]):
    """`view.clip_ratio`, `view["clip_ratio"]`, `view.get("clip_ratio", 0.2)`; sections below are views, too.

    `extra` are values beside those of the section. A key that is in neither is missing, and `get` gives its default.
    """

    def __init__(self, section: Section, **extra: Any) -> None:
        self._section = section
        self._extra = extra

    def __getitem__(self, key: str) -> Any:
        if key in self._extra:
            return self._extra[key]
        if key not in type(self._section).model_fields:
            raise KeyError(key)
        value = getattr(self._section, key)
        return ConfigView(value) if isinstance(value, Section) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            pass
        try:
            return getattr(self._section, name)  # a property of the section
        except AttributeError:
            kind = type(self._section).__name__
            raise AttributeError(f"{kind} has no key {name!r}; read it with get({name!r}, default)") from None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*type(self._section).model_fields, *self._extra]))

    def __len__(self) -> int:
        return len(list(iter(self)))

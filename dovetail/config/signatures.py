"""Which arguments a user's function is called with: those that its signature names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named_arguments(function: Callable[..., Any] | inspect.Signature, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that the function names; all of them when it takes `**`."""
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(values)
    return {p.name: values[p.name] for p in parameters if p.kind in _BY_NAME and p.name in values}


def missing_arguments(function: Callable[..., Any] | inspect.Signature, names: Iterable[str]) -> list[str]:
    """Parameters without a default that are not among `names`."""
    known = set(names)
    named = (p for p in _parameters(function) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return [p.name for p in named if p.default is p.empty and p.name not in known]


def _parameters(function: Callable[..., Any] | inspect.Signature) -> list[inspect.Parameter]:
    signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    return list(signature.parameters.values())

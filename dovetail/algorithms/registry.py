"""Tables of advantage estimators and policy losses, by name. Users add their own with a decorator.

An unknown name is an error that lists the known ones and the nearest; a name is never silently replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch

from dovetail.config.wording import did_you_mean

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(token_level_rewards, response_mask, ...) -> (advantages, returns)`, all of shape (rows, response width)."""

PolicyLossFn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`(old_log_prob, log_prob, advantages, response_mask, ...) -> (loss, metrics)`; both are shares, see `agg_loss`."""

SelectorFn = Callable[..., torch.Tensor]
"""Same first four arguments as a policy loss, on the whole mini-batch; returns a boolean column for its rows."""

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_ADVANTAGE_ESTIMATORS: dict[str, AdvantageFn] = {}
_POLICY_LOSSES: dict[str, PolicyLossFn] = {}
_SELECTORS: dict[str, SelectorFn] = {}
_LOSS_COLUMNS: dict[str, tuple[str, ...]] = {}


def register_adv_est(*names: str | Enum) -> Callable[[_Fn], _Fn]:
    """Decorator: make an advantage estimator known as `algorithm.adv_estimator=<name>`."""

    def decorate(fn: _Fn) -> _Fn:
        for name in names:
            _add(_ADVANTAGE_ESTIMATORS, "advantage estimator", _text(name), fn)
        return fn

    return decorate


def register_policy_loss(
    *names: str | Enum, select: SelectorFn | None = None, columns: Sequence[str] = ()
) -> Callable[[_Fn], _Fn]:
    """Decorator: make a policy loss known as `actor.policy_loss.loss_mode=<name>`.

    `columns` are columns of the batch that this loss reads beside the usual ones; it gets each as an argument of that
    name. Only columns that a loss asks for are sent to the workers.

    `select` is for losses that pick tokens by comparing them over the whole mini-batch: it runs once on the whole
    mini-batch, and its boolean result travels with the rows as the loss's `loss_selection` argument.
    """

    def decorate(fn: _Fn) -> _Fn:
        for name in names:
            _add(_POLICY_LOSSES, "policy loss", _text(name), fn)
            if select is not None:
                _add(_SELECTORS, "policy loss selector", _text(name), select)
            if columns:
                _LOSS_COLUMNS[_text(name)] = tuple(columns)
        return fn

    return decorate


def get_adv_estimator_fn(name: str | Enum) -> AdvantageFn:
    return _find(_ADVANTAGE_ESTIMATORS, "advantage estimator", _text(name))


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFn:
    return _find(_POLICY_LOSSES, "policy loss", _text(name))


def get_policy_loss_selector(name: str | Enum) -> SelectorFn | None:
    """The whole-mini-batch selection of a loss, or None when the loss looks at each row alone."""
    get_policy_loss_fn(name)
    return _SELECTORS.get(_text(name))


def get_policy_loss_columns(name: str | Enum) -> tuple[str, ...]:
    """Columns of the batch that a loss asked for when it was registered."""
    get_policy_loss_fn(name)
    return _LOSS_COLUMNS.get(_text(name), ())


def adv_estimator_names() -> list[str]:
    return sorted(_ADVANTAGE_ESTIMATORS)


def policy_loss_names() -> list[str]:
    return sorted(_POLICY_LOSSES)


def _text(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _add(table: dict[str, Any], kind: str, name: str, fn: Callable[..., Any]) -> None:
    if name in table and table[name] is not fn:
        raise ValueError(f"{kind} {name!r} is already {table[name].__qualname__}; choose another name for {fn}.")
    table[name] = fn


def _find(table: dict[str, Any], kind: str, name: str) -> Any:
    if name in table:
        return table[name]
    raise ValueError(f"Unknown {kind} {name!r}.{did_you_mean(name, table)} Known names: {', '.join(sorted(table))}.")

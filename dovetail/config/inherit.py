"""Fill keys whose null means "same as another key", or what follows from others. Works on plain trees, before they are
validated. A section that is no mapping is left as it is: validation reports it."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from dovetail.config.async_training import AsyncTrainingConfig
from dovetail.config.keys import catalogue
from dovetail.config.tree import Tree, get, merge, put, remove

_RETURNS_EXPERTS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def filled(root: type[BaseModel], values: dict[str, Any]) -> Tree:
    """A copy of `values` in which every key of `root` that can be inferred and is not set has its value."""
    tree: Tree = {}
    merge(tree, values)
    _inherit(root, tree)
    with suppress(ValueError):
        _choose_old_policy(tree)
    if get(tree, "actor_rollout_ref.actor.router_replay.mode") == "R3" and get(tree, _RETURNS_EXPERTS) is None:
        with suppress(ValueError):
            put(tree, _RETURNS_EXPERTS, True)
    if get(tree, "trainer.method") == "distill" and get(tree, "algorithm.adv_estimator") is None:
        with suppress(ValueError):
            put(tree, "algorithm.adv_estimator", "grpo")  # which needs no critic
    return tree


@cache
def inheritance(root: type[BaseModel]) -> dict[str, str]:
    """Every inheriting key of `root` with the key that it inherits from, which is declared before it."""
    return {key.name: key.inherits for key in catalogue(root).values() if key.inherits}


def _inherit(root: type[BaseModel], tree: Tree) -> None:
    """Null stays where it is a value of its own (`keeps_null`). A source that is not set either leaves the key out: its
    default is the source's default already."""
    unset = object()
    for key, source in inheritance(root).items():
        own, value = get(tree, key, unset), get(tree, source)
        if own is not unset and (own is not None or catalogue(root)[key].keeps_null):
            continue
        remove(tree, key)
        if value is not None:
            with suppress(ValueError):
                put(tree, key, value)


def _choose_old_policy(tree: Tree) -> None:
    """Make `async_training.prox` and `bypass_mode` agree where stale responses are trained and one of them is unset.

    Without either, the engine's log-probs are the old ones.
    """
    bypass = "algorithm.rollout_correction.bypass_mode"
    try:
        settings = AsyncTrainingConfig.model_validate(tree.get("async_training") or {})
    except ValidationError:
        return  # reported with all other mistakes
    if settings.staleness_bound == 0:
        return
    given = get(tree, bypass)
    if given is None:
        put(tree, bypass, settings.prox is None)
    elif given is False and settings.prox is None:
        put(tree, "async_training.prox", "recompute")

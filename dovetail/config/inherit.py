"""Fill keys whose null means "same as another key", or what follows from others. Works on plain trees, before they are
validated."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from dovetail.config.async_training import AsyncTrainingConfig
from dovetail.config.keys import catalogue
from dovetail.config.tree import merge, put, remove


def fill_inherited(root: type[BaseModel], tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` in which every inheriting key of `root` that is missing or null has its source's value.

    Null stays where it is a value of its own (`keeps_null`). A source that is not set either leaves the key
    out: its default is the source's default already.
    """
    filled: dict[str, Any] = {}
    merge(filled, tree)
    for key, source in inheritance(root).items():
        own_null = catalogue(root)[key].keeps_null and _is_set(tree, key)
        if _get(tree, key) is not None or own_null or _blocked(filled, key):
            continue
        value = _follow(root, tree, source)
        if value is None:
            remove(filled, key)
        else:
            put(filled, key, value)
    return filled


def fill_old_policy(tree: dict[str, Any]) -> None:
    """Make `async_training.prox` and `bypass_mode` agree where stale responses are trained and one of them is unset.

    Without either, the engine's log-probs are the old ones.
    """
    section, bypass = tree.get("async_training"), "algorithm.rollout_correction.bypass_mode"
    try:
        settings = AsyncTrainingConfig.model_validate(section or {})
    except ValidationError:
        return  # reported with all other mistakes
    if settings.staleness_bound == 0 or _blocked(tree, bypass):
        return
    given = _get(tree, bypass)
    if given is None:
        put(tree, bypass, settings.prox is None)
    elif given is False and settings.prox is None and isinstance(section, dict):
        put(tree, "async_training.prox", "recompute")


def fill_distillation(tree: dict[str, Any]) -> None:
    """An estimator that needs no critic, where a run distills and names none."""
    estimator = "algorithm.adv_estimator"
    if _get(tree, "trainer.method") == "distill" and _get(tree, estimator) is None and not _blocked(tree, estimator):
        put(tree, estimator, "grpo")


@cache
def inheritance(root: type[BaseModel]) -> dict[str, str]:
    """Every inheriting key of `root` with the key that it inherits from."""
    return {key.name: key.inherits for key in catalogue(root).values() if key.inherits}


def _follow(root: type[BaseModel], tree: dict[str, Any], key: str) -> Any:
    """The value of `key`, or of the first set key up its chain of sources."""
    sources = inheritance(root)
    value = _get(tree, key)
    while value is None and key in sources:
        key = sources[key]
        value = _get(tree, key)
    return value


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(tree, BaseModel):
            # A section given as a model carries defaults too; only what its author set counts as set.
            tree = getattr(tree, part, None) if part in tree.model_fields_set else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _is_set(tree: dict[str, Any], key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    node = _get(tree, section)
    return leaf in (node.model_fields_set if isinstance(node, BaseModel) else node or ())


def _blocked(tree: dict[str, Any], key: str) -> bool:
    """Whether a section on the way is not a dict: a typed section stays as it was built, a wrong value is reported."""
    node: Any = tree
    for part in key.split(".")[:-1]:
        if not isinstance(node, dict):
            return True
        node = node.get(part, {})
    return not isinstance(node, dict)

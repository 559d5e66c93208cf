"""No key is silent: each is read by some part, or is in a table that says what happens instead."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dovetail.config import DovetailConfig
from dovetail.config.keys import catalogue

pytestmark = pytest.mark.unit

PACKAGE = Path(__file__).parents[2] / "dovetail"
CONFIG = PACKAGE / "config"

# Read as a whole section or by a name made at run time, which a search for `.name` does not see.
READ_OTHERWISE = {
    f"actor_rollout_ref.actor.policy_loss.{name}": "workers/actor.py passes model_dump() of the section to the loss"
    for name in (
        *("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    )
} | {f"ray_init.{name}": "RayInitConfig.init_arguments reads it with getattr" for name in ("address", "num_cpus")}


def test_every_key_acts_or_says_that_it_does_not() -> None:
    read = names_read_outside_config()
    silent = [
        key
        for key, entry in catalogue(DovetailConfig).items()
        if key.rpartition(".")[2] not in read and not entry.rules and key not in READ_OTHERWISE
    ]
    assert silent == [], "make a part read these keys, or say at the field what happens instead"


def test_no_entry_of_the_tables_is_left_over() -> None:
    assert [key for key in READ_OTHERWISE if key not in catalogue(DovetailConfig)] == []


def test_a_new_key_that_nobody_reads_is_found() -> None:
    assert "clip_ratio_low" in names_read_outside_config(), "read through the property clip_low"
    assert "calculate_log_probs" not in names_read_outside_config()


@cache
def names_read_outside_config() -> set[str]:
    """Attributes that the package reads outside `dovetail/config`, and those behind the properties it reads there."""
    read = {
        node.attr
        for file in PACKAGE.rglob("*.py")
        if CONFIG not in file.parents
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    behind = attributes_behind_methods()
    fresh = set(read)
    while fresh:
        fresh = {name for method in fresh for name in behind.get(method, ())} - read
        read |= fresh
    return read


def attributes_behind_methods() -> dict[str, set[str]]:
    """What each property and method of a section reads, by its name."""
    behind: dict[str, set[str]] = defaultdict(set)
    for method in methods_of_sections():
        behind[method.name] |= {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return behind


def methods_of_sections() -> Iterator[ast.FunctionDef]:
    for file in CONFIG.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                yield from (item for item in node.body if isinstance(item, ast.FunctionDef))

"""A key that a whole run never reads says so when it is set: a notice, a finding or a refusal that names it.

The run is watched: every read of a section's field outside the checks and the plan is noted.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import ConfigError, DovetailConfig, load_config
from dovetail.config.base import Section
from dovetail.config.checks import check_config
from dovetail.config.effects import unsupported_in_runs
from dovetail.config.keys import Key, catalogue
from tests.trainer.toy_run import DAPO, Toy, train

pytestmark = pytest.mark.e2e

# Reads in here decide nothing in a run.
LOOKING_ON = tuple(f"/dovetail/config/{name}" for name in ("checks", "plan", "effects", "load"))

# What acts, or not, by something else than other keys: it cannot be known before the run.
DEPENDS = {
    "data.return_multi_modal_inputs": "whether prompts hold images",
    "data.mm_processor_kwargs": "whether prompts hold images",
    "reward_model.sandbox_fusion.memory_limit_mb": "whether a data source is scored by running code",
    "actor_rollout_ref.rollout.weight_sync": "the test asks for colocated, which happens anyway",
    "actor_rollout_ref.rollout.calculate_log_probs": "the engine's log-probs are always kept",
    "ray_init.*": "the run is watched in one process, without Ray",
    "reward_model.score_on": "the run is watched in one process, without Ray",
    "reward_model.code_isolation": "whether a data source is scored by running code",
    "data.skip_bad_rows": "whether the data holds bad rows",
    "trainer.total_epochs": "trainer.total_training_steps is set in the test",
    "trainer.resume_from_path": "there is nothing to resume in the test",
    "*.checkpoint.load_contents": "there is nothing to resume in the test",
    "critic.enable": "the test sets what the estimator asks for anyway",
}

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.actor.use_kl_loss": True,
    },
    "dapo": {**DAPO, "algorithm.rollout_correction.rollout_is": "token"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_key_that_no_part_of_a_run_reads_says_so(toy: Toy, tmp_path: Path, name: str) -> None:
    once = {"trainer.total_training_steps": 1, "trainer.save_freq": 1}
    changes = RUNS[name] | once | {"data.val_files": str(toy.data / "val.parquet")}
    keys = toy.keys(tmp_path / "run", changes)
    if name != "ppo":
        keys = {key: value for key, value in keys.items() if not key.startswith("critic.")}
    base = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    config = load_config(overrides=base).config
    with noted_reads(config) as read:
        train(config)
    assert {"data.train_batch_size", "actor_rollout_ref.actor.clip_ratio", "trainer.save_freq"} <= read, "it watches"
    unread = [key for key in catalogue(DovetailConfig).values() if key.name not in read and key.name not in keys]
    silent = [key.name for key in unread if not _depends(key.name) and not says_so(base, key)]
    assert silent == [], "make a part read these keys, or say at their field what switches them off"


@contextmanager
def noted_reads(config: DovetailConfig) -> Iterator[set[str]]:
    """Full names of the fields that are read inside, of `config` and of copies of its sections."""
    names, read, copies = dict(_named_sections(config, "")), set(), []
    plain, copied = Section.__getattribute__, Section.model_copy

    def noting(self: Section, name: str) -> Any:
        value = plain(self, name)
        prefix = names.get(id(self))
        if prefix is not None and name in type(self).model_fields and _outside_checks(sys._getframe(1)):
            read.add(f"{prefix}{name}")
        return value

    def model_copy(self: Section, **options: Any) -> Any:
        new = copied(self, **options)
        copies.append(new)  # kept, so that no other object gets its id
        names[id(new)] = names.get(id(self), "")
        return new

    Section.__getattribute__, Section.model_copy = noting, model_copy  # type: ignore[method-assign]
    try:
        yield read
    finally:
        del Section.__getattribute__, Section.model_copy


def says_so(base: list[str], key: Key) -> bool:
    """Whether another value of the key is refused, noticed or found by a check, with its name."""
    for value in _other_values(key):
        written = value if isinstance(value, str) else json.dumps(value)
        try:
            loaded = load_config(overrides=[*base, f"{key.name}={written}"])
        except ConfigError:
            continue  # no value of this key
        said = [*loaded.notices, *check_config(loaded.config), *unsupported_in_runs(loaded.config)]
        return any(key.name in f"{item.key} {item.message}" for item in said)
    return True


def _depends(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in DEPENDS)


def _named_sections(section: Section, prefix: str) -> Iterator[tuple[int, str]]:
    yield id(section), prefix
    for name in type(section).model_fields:
        if isinstance(below := getattr(section, name), Section):
            yield from _named_sections(below, f"{prefix}{name}.")


def _outside_checks(frame: types.FrameType | None) -> bool:
    """Whether the first caller beyond properties of sections is a part of the run."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in LOOKING_ON):
            return False
        if "/dovetail/config/" not in file and "pydantic" not in file and file != __file__:
            return "/dovetail/" in file
        frame = frame.f_back
    return False


def _other_values(key: Key) -> Iterator[Any]:
    for value in _values(key.field.annotation, key.default):
        if value != key.default:
            yield value


def _values(kind: Any, default: Any) -> Iterator[Any]:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from _values(part, default)
    elif origin is typing.Literal:
        yield from typing.get_args(kind)
    elif kind is bool:
        yield not default
    elif kind is int:
        yield (default if isinstance(default, int) else 1) + 2
    elif kind is float:
        yield from (0.37, 1.37)
    elif kind is str:
        yield "some_text"
    elif origin is list:
        yield from ([3], ["model"])
    elif origin is dict:
        yield {"some": 1}

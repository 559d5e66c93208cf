"""Which backend trains, as verl's lists choose it: `model_engine`, a file of a Hydra group, or keys of Megatron alone.

A choice that does not exist here is one problem: the keys that only its file knows are not reported one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.config.keys import find_key
from dovetail.config.root import DovetailConfig
from dovetail.config.translate.groups import ROLES, Translated

_ENGINE, _ACTOR = "model_engine", "actor_rollout_ref.actor"
_SECTIONS = tuple(f"{role}." for role in ROLES)
_BACKENDS = {"dp": None, "fsdp": None, "megatron": "megatron"}
"""verl's engines that exist here, and the strategy that each asks for; None leaves the default."""
# Groups of which verl has one file each: it is the schema's defaults.
_ONLY_FILES = ("hf_model", "rollout", "reward", "legacy_data", "rollout_correction", "distillation", "transfer_queue")
_FIX = (
    "policies are trained by fsdp2 (also fsdp, single) or megatron here; take it out, or choose megatron with "
    f"{_ACTOR}.strategy=megatron, and write the settings below {_ACTOR}.fsdp_config or .megatron"
)

SPELLINGS = (
    (f"{_ACTOR}.megatron.*", f"{_ACTOR}.strategy=megatron", "when no strategy is set"),
    ("model_engine=megatron", f"{_ACTOR}.strategy=megatron", "when no strategy is set; dp and fsdp: the default"),
    (f"actor@{_ACTOR}=megatron_actor", f"{_ACTOR}.strategy=megatron", "when no strategy is set; critic, ref: the same"),
)
"""What these rules do, for the documents: written as, read as, why."""


def chosen_groups(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The choices in an entry of a file's `defaults`, as overrides would make them. `${model_engine}_actor` is none."""
    for name, file in entry.items():
        group = str(name).removeprefix("override ").strip(" /")
        if (group == _ENGINE or "@" in group) and "$" not in str(file):
            yield group, file


def model_engine(keys: Translated) -> None:
    """One choice for all roles; the critic and the reference inherit the actor's."""
    for key, name in keys.take(_ENGINE, f"{_ACTOR}.{_ENGINE}").items():
        _choose(keys, _ACTOR, str(name), f"{key}={name}")


def hydra_groups(keys: Translated) -> None:
    """`actor@actor_rollout_ref.actor=NAME_actor`: a file for one section."""
    for key, name in keys.take(*(key for key in keys.leaves if "@" in key)).items():
        section, file = key.partition("@")[2], str(name)
        if section in ROLES:
            _choose(keys, section, file.removesuffix(f"_{section.rpartition('.')[2]}"), f"{key}={file}")
        elif file not in _ONLY_FILES:
            keys.problem(key, f"{key}={file} selects a file of another launcher; set the keys that it holds instead.")


def implied_megatron(keys: Translated) -> None:
    """Lists for a Megatron file set `*.megatron.*` and no strategy, because that file chose the backend."""
    if keys.leaves.get(f"{_ACTOR}.strategy") is not None:
        return
    for role in (_ACTOR, "critic"):
        used = next((key for key in keys.leaves if key.startswith(f"{role}.megatron.")), None)
        if used is not None and keys.leaves.get(f"{role}.strategy") is None:
            keys.put(f"{role}.strategy", "megatron", used)
            keys.notice(f"{role}.strategy", f"{used} is set and {role}.strategy is not: it is read as megatron.")


def _choose(keys: Translated, role: str, backend: str, written: str) -> None:
    key, strategy = written.partition("=")[0], f"{role}.strategy"
    if backend not in _BACKENDS:
        keys.problem(key, f"{written} is not supported: {_FIX}.")
        keys.take(*(name for name in keys.leaves if name.startswith(_SECTIONS) and _is_of_file(name)))
    elif _BACKENDS[backend] is None and keys.leaves.get(strategy) is None:
        if used := next((name for name in keys.leaves if name.startswith(f"{role}.megatron.")), None):
            keys.problem(key, f"{written} and {used} name different backends; keep one.")
    elif keys.leaves.get(strategy) is None:
        keys.put(strategy, _BACKENDS[backend], key)
        keys.notice(key, f"{written} is read as {strategy}={_BACKENDS[backend]}.")


def _is_of_file(name: str) -> bool:
    """Whether only the file of a backend knows the key, or it names the backend again."""
    return find_key(DovetailConfig, name) is None or name.endswith(".strategy")


RULES = (model_engine, hydra_groups, implied_megatron)

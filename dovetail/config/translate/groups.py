"""Old spellings that mean something only together: three generations of importance-sampling keys, and micro-batch
sizes that count sequences over all devices. Each rule takes out leaf keys and puts in others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.config.errors import Notice, Problem
from dovetail.config.trainer import TrainerConfig


@dataclass
class Translated:
    """Leaf keys on the way to their one spelling, what each was written as, and what there is to say about it."""

    leaves: dict[str, Any]
    spelling: dict[str, str] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def notice(self, key: str, message: str) -> None:
        self.notices.append(Notice(key, message))

    def problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(key, message))

    def take(self, *keys: str) -> dict[str, Any]:
        """Take `keys` out; returns those that are set. Null means "not set"."""
        taken = {key: self.leaves.pop(key) for key in keys if key in self.leaves}
        return {key: value for key, value in taken.items() if value is not None}

    def put(self, new: str, value: Any, old: str) -> None:
        """Give `new` the value that was written as `old`, unless another spelling gave it a different one."""
        given = self.leaves.get(new)
        if given is not None and value is not None and given != value:
            both = f"{self.spelling.get(new, new)}={given} and {old}={value}"
            self.problem(new, f"{both} set the same thing to different values; keep {new} only.")
        elif value is not None:
            self.leaves[new], self.spelling[new] = value, old

    def put_all(self, values: Values) -> None:
        """The same for several keys."""
        for new, (value, old) in values.items():
            self.put(new, value, old)

    def size(self, *keys: str) -> Any:
        """The first of `keys` that is set, else 1."""
        return next((self.leaves[key] for key in keys if self.leaves.get(key) is not None), 1)


Values = dict[str, tuple[Any, str]]
"""What a rule sets: new key -> (value, how it was written). None sets nothing."""

_ACTOR = "actor_rollout_ref.actor"
ROLES = (_ACTOR, "actor_rollout_ref.ref", "critic")
"""Sections for which verl has a file of each backend, and a profiler."""
_CORRECTION = "algorithm.rollout_correction"
_IS, _THRESHOLD = f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_threshold"
_RS, _BOUND = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
# Levels of the second generation, as rejection rules of the third.
_REJECTION = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_VETOES = (f"{_CORRECTION}.rollout_token_veto_threshold", f"{_CORRECTION}.rollout_is_veto_threshold")
_LOSS, _BYPASS = f"{_ACTOR}.policy_loss.loss_mode", f"{_CORRECTION}.bypass_mode"
_RANKS, _ALL_RANKS = "global_profiler.ranks", "global_profiler.all_ranks"
_RATIO_CAPS = (f"{_ACTOR}.tis_imp_ratio_cap", f"{_ACTOR}.behav_imp_weight_cap")


def ratio_cap(keys: Translated) -> None:
    """First generation: one cap on the token ratio; -1 switches it off."""
    for key, cap in keys.take(*_RATIO_CAPS).items():
        if not isinstance(cap, int | float) or cap <= 0:
            keys.notice(key, f"{key}={cap} means no importance weights here, as it did.")
            continue
        keys.put_all({_IS: ("token", key), _THRESHOLD: (cap, key)})
        keys.notice(key, f"{key}={cap} is read as {_IS}=token with rollout_is_threshold={cap}.")


def flat_importance_sampling(keys: Translated) -> None:
    """Second generation: `algorithm.rollout_is` and `algorithm.rollout_is_*` (see `FLAT_KEYS`)."""
    prefix = "algorithm.rollout_is"
    given = {key.removeprefix("algorithm."): value for key, value in keys.take(*_FLAT_NAMES).items()}
    if not given:
        return
    threshold, level = given.get("rollout_is_threshold"), given.get("rollout_is_level", "token")
    mode, lower = given.get("rollout_is_mode", "truncate"), given.get("rollout_is_threshold_lower")
    values: Values = {}
    if level not in _REJECTION:
        return keys.problem(f"{prefix}_level", f"{prefix}_level={level}: use one of {', '.join(_REJECTION)}.")
    if mode not in ("truncate", "mask"):
        return keys.problem(f"{prefix}_mode", f"{prefix}_mode={mode}: use truncate or mask.")
    if level == "geometric" and mode == "truncate":
        return keys.problem(
            f"{prefix}_level",
            f"{prefix}_level=geometric with rollout_is_mode=truncate has no counterpart: a geometric mean "
            f"is not an importance weight; set {_RS}=seq_mean_k1 with rollout_rs_threshold.",
        )
    if given.get("rollout_is") and threshold is not None and level != "geometric":
        values |= {_IS: (level, prefix), _THRESHOLD: (threshold, f"{prefix}_threshold")}
    if mode == "mask" and threshold is not None:
        bounds = f"{lower if lower is not None else round(1 / threshold, 6)}_{threshold}"
        values |= {_RS: (_REJECTION[level], f"{prefix}_mode"), _BOUND: (bounds, f"{prefix}_threshold")}
    values[f"{_IS}_batch_normalize"] = (given.get("rollout_is_batch_normalize"), f"{prefix}_batch_normalize")
    _veto(keys, values, given.get("rollout_is_veto_threshold"), f"{prefix}_veto_threshold")
    keys.put_all(values)
    written = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, (value, _) in values.items() if value)
    keys.notice(prefix, f"{prefix}* is read as {_CORRECTION}: {written or 'no importance weights, no rejection'}.")


def early_rollout_correction(keys: Translated) -> None:
    """Third generation, first names: rejection by level, a separate lower bound, a veto, `use_policy_gradient`."""
    leaves, values = keys.leaves, {}
    name, lower, upper = leaves.get(_RS), leaves.get(f"{_BOUND}_lower"), leaves.get(_BOUND)
    vetoes = keys.take(*_VETOES)
    keys.take(f"{_BOUND}_lower")
    if isinstance(name, str) and name in _REJECTION:
        upper = leaves.get(_THRESHOLD, 2.0) if upper is None else upper
        bounds = upper if lower is None else f"{lower}_{upper}"
        values |= {_RS: (_REJECTION[name], f"{_RS}={name}"), _BOUND: (bounds, f"{_BOUND}_lower")}
        keys.notice(_RS, f"{_RS}={name} is read as {_REJECTION[name]} with the bounds {bounds}.")
    elif name is not None:
        values |= {_RS: (name, _RS), _BOUND: (upper, _BOUND)}
    for key, threshold in vetoes.items():
        _veto(keys, values, threshold, key)
    threshold = leaves.get(_THRESHOLD)
    if isinstance(threshold, str) and "_" in threshold:
        # `lower_upper` drops weights outside the two instead of cutting them.
        lower, _, upper = threshold.partition("_")
        values |= {_THRESHOLD: (upper, _THRESHOLD), f"{_THRESHOLD}_lower": (lower, _THRESHOLD)}
        keys.notice(_THRESHOLD, f"{_THRESHOLD}={threshold} is read as {upper} with {_THRESHOLD}_lower={lower}.")
    if leaves.get(_IS) == "geometric" and name is not None:
        keys.take(_IS)
        reason = "a geometric mean is no importance weight; the rejection stays"
        keys.notice(_IS, f"{_IS}=geometric is read as null: {reason}.")
    for key, on in keys.take(
        f"{_CORRECTION}.use_policy_gradient", f"{_CORRECTION}.use_pure_rollout_correction"
    ).items():
        if on:
            values[f"{_CORRECTION}.loss_type"] = ("reinforce", key)
            keys.notice(key, f"{key} is read as {_CORRECTION}.loss_type=reinforce.")
    keys.take(*values)
    keys.put_all(values)


def bypass_loss(keys: Translated) -> None:
    """verl's name of the policy loss in bypass mode; here the mode is a key, and the loss is what `loss_type` says."""
    if keys.leaves.get(_LOSS) == "bypass_mode":
        keys.take(_LOSS)
        keys.put(_BYPASS, True, f"{_LOSS}=bypass_mode, that is {_BYPASS}")
        keys.notice(_LOSS, f"{_LOSS}=bypass_mode is read as {_BYPASS}=True; {_CORRECTION}.loss_type says which loss.")


def _veto(keys: Translated, values: Values, threshold: Any, key: str) -> None:
    """A veto on single tokens is one more rejection rule. That rule is symmetric: it also vetoes tokens that are as
    much more likely."""
    if not isinstance(threshold, int | float) or not 0 < threshold < 1:
        return
    limit = round(0.5 * math.log(threshold) ** 2, 4)
    first, first_bound = (values.get(name, (None, ""))[0] for name in (_RS, _BOUND))
    values[_RS] = (f"{first},seq_max_k2" if first else "seq_max_k2", key)
    values[_BOUND] = (f"{first_bound},{limit}" if first else limit, key)
    keys.notice(
        key,
        f"{key}={threshold} is read as the rejection rule seq_max_k2 with the bound {limit}, "
        "which also drops sequences with a token that is as many times more likely.",
    )


def profiled_ranks(keys: Translated) -> None:
    """Each role named the processes that it profiles; here a process plays all roles, and is profiled or not."""
    given = keys.take(*(f"{role}.profiler.{name}" for role in ROLES for name in ("all_ranks", "ranks")))
    ranks = [rank for value in given.values() if isinstance(value, list) for rank in value]
    values: Values = {}
    for key, value in given.items():
        if key.endswith(".all_ranks") and value:
            values[_ALL_RANKS] = (value, key)
        elif key.endswith(".ranks") and value:
            values[_RANKS] = (list(dict.fromkeys(ranks)) or value, key)
    keys.put_all(values)
    for name, (value, key) in values.items():
        keys.notice(key, f"{key} is read as {name}={value}: a process that is profiled is so with all its roles.")


def global_micro_batches(keys: Translated) -> None:
    """Micro-batch sizes that count sequences over all devices become sizes on one device."""
    for old, size in keys.take(*GLOBAL_MICRO_BATCHES).items():
        new, replicas = GLOBAL_MICRO_BATCHES[old], _data_parallel_size(keys, old)
        if not isinstance(size, int) or size <= 0 or replicas is None or size % replicas:
            count = "the number of data-parallel ranks" if replicas is None else f"{replicas} data-parallel ranks"
            why = f"counts sequences over all devices and does not divide by {count}"
            keys.problem(old, f"{old}={size} {why}; set {new}.")
            continue
        keys.put(new, size // replicas, old)
        keys.notice(old, f"{old}={size} over {replicas} data-parallel ranks is read as {new}={size // replicas}.")


def _data_parallel_size(keys: Translated, key: str) -> int | None:
    """Ranks that see different sequences in the role of `key`; None when the sizes do not fit."""
    roles = ("actor_rollout_ref.ref", "critic", "reward_model")
    # The old log-probs of the rollout section are computed by the actor.
    role = next((name for name in roles if key.startswith(name)), _ACTOR)
    devices = TrainerConfig.model_fields["n_gpus_per_node"].default
    world = keys.size("trainer.nnodes") * keys.leaves.get("trainer.n_gpus_per_node", devices)
    names: tuple[str, ...] = ("ulysses_sequence_parallel_size",)
    if (keys.leaves.get(f"{role}.strategy") or keys.leaves.get(f"{_ACTOR}.strategy")) == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        names = tuple(f"megatron.{name}" for name in sizes)
    shared = 1
    for name in names:
        shared *= keys.size(f"{role}.{name}", f"{_ACTOR}.{name}")
    if not isinstance(world, int) or not isinstance(shared, int) or shared < 1 or world % shared:
        return None
    return world // shared


GROUP_RULES: tuple[Callable[[Translated], None], ...] = (
    ratio_cap,
    flat_importance_sampling,
    early_rollout_correction,
    bypass_loss,
    profiled_ranks,
    global_micro_batches,
)

GLOBAL_MICRO_BATCHES = {
    name: f"{name}_per_gpu"
    for name in (
        f"{_ACTOR}.ppo_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "critic.ppo_micro_batch_size",
        "critic.forward_micro_batch_size",
        "reward_model.micro_batch_size",
    )
} | {"data.micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu"}

# The second generation: name, typed key, meaning.
FLAT_KEYS = (
    ("rollout_is", "rollout_is", "true: weights at `rollout_is_level`; false: none"),
    ("rollout_is_level", "rollout_is", "token or sequence; geometric is a rejection rule only"),
    ("rollout_is_mode", "rollout_rs", "truncate: no rejection; mask: reject outside the bounds"),
    ("rollout_is_threshold", "rollout_is_threshold", "with mask also the upper bound of `rollout_rs_threshold`"),
    ("rollout_is_threshold_lower", "rollout_rs_threshold", "with mask the lower bound, null: 1 / upper; else unused"),
    ("rollout_is_veto_threshold", "rollout_rs", "seq_max_k2 with the threshold 0.5 x log(veto)^2"),
    ("rollout_is_batch_normalize", "rollout_is_batch_normalize", "the same value"),
)
_FLAT_NAMES = tuple(f"algorithm.{name}" for name, _, _ in FLAT_KEYS)

GROUP_SPELLINGS = (
    *((old, new, "divided by the number of data-parallel ranks") for old, new in GLOBAL_MICRO_BATCHES.items()),
    *((f"algorithm.{old}", f"{_CORRECTION}.{new}", meaning) for old, new, meaning in FLAT_KEYS),
    (_RATIO_CAPS[0], _THRESHOLD, "with `rollout_is=token`; not positive: no weights"),
    (f"{_RS}=token, sequence, geometric", f"{_RS}=token_k1, seq_sum_k1, seq_mean_k1", ""),
    (f"{_BOUND}_lower", f"{_BOUND}=lower_upper", ""),
    (_VETOES[0], _RS, "one more rule, seq_max_k2 with the threshold 0.5 x log(veto)^2"),
    (f"{_CORRECTION}.use_policy_gradient", f"{_CORRECTION}.loss_type=reinforce", ""),
    (f"{_LOSS}=bypass_mode", f"{_BYPASS}=True", ""),
    *((f"{role}.profiler.ranks", _RANKS, "those of all roles together; all_ranks: the same") for role in ROLES),
)
"""What these rules do, for the documents: written as, read as, why."""

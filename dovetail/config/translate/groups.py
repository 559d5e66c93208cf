"""Old spellings that mean something only together: three generations of importance-sampling keys, and micro-batch
sizes that count sequences over all devices. Each rule takes the leaf keys and says which it consumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.config.actor import ActorConfig
from dovetail.config.async_training import AsyncTrainingConfig
from dovetail.config.errors import Notice, Problem
from dovetail.config.trainer import TrainerConfig


@dataclass
class GroupResult:
    """Keys that a rule consumed, and the values it sets: new key -> (value, how it was written)."""

    consumed: list[str] = field(default_factory=list)
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
# Levels of the second generation, as rejection rules of the third.
_REJECTION = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_VETOES = (f"{_CORRECTION}.rollout_token_veto_threshold", f"{_CORRECTION}.rollout_is_veto_threshold")
_RATIO_CAPS = (f"{_ACTOR}.tis_imp_ratio_cap", f"{_ACTOR}.behav_imp_weight_cap")


def ratio_cap(leaves: Mapping[str, Any]) -> GroupResult:
    """First generation: one cap on the token ratio; -1 switches it off."""
    result = GroupResult(consumed=[key for key in _RATIO_CAPS if key in leaves])
    for key in result.consumed:
        cap = leaves[key]
        if not isinstance(cap, int | float) or cap <= 0:
            result.notices.append(Notice(key, f"{key}={cap} means no importance weights here, as it did."))
            continue
        result.values[f"{_CORRECTION}.rollout_is"] = ("token", key)
        result.values[f"{_CORRECTION}.rollout_is_threshold"] = (cap, key)
        result.notices.append(
            Notice(key, f"{key}={cap} is read as {_CORRECTION}.rollout_is=token with rollout_is_threshold={cap}.")
        )
    return result


def flat_importance_sampling(leaves: Mapping[str, Any]) -> GroupResult:
    """Second generation: `algorithm.rollout_is` and `algorithm.rollout_is_*` (see `FLAT_KEYS`)."""
    prefix = "algorithm.rollout_is"
    result = GroupResult(consumed=[key for key in leaves if key == prefix or key.startswith(f"{prefix}_")])
    if not result.consumed:
        return result
    values = {key.removeprefix("algorithm."): leaves[key] for key in result.consumed}
    unknown = set(values) - {name for name, _, _ in FLAT_KEYS}
    result.consumed = [key for key in result.consumed if key.removeprefix("algorithm.") not in unknown]
    threshold, level = values.get("rollout_is_threshold"), values.get("rollout_is_level", "token")
    mode, lower = values.get("rollout_is_mode", "truncate"), values.get("rollout_is_threshold_lower")
    if (problem := _check_flat(level, mode)) is not None:
        result.problems.append(problem)
        return result
    weighted = bool(values.get("rollout_is")) and threshold is not None
    if weighted and level != "geometric":
        result.values[f"{_CORRECTION}.rollout_is"] = (level, prefix)
        result.values[f"{_CORRECTION}.rollout_is_threshold"] = (threshold, f"{prefix}_threshold")
    if mode == "mask" and threshold is not None:
        bounds = f"{lower if lower is not None else round(1 / threshold, 6)}_{threshold}"
        result.values[f"{_CORRECTION}.rollout_rs"] = (_REJECTION[level], f"{prefix}_mode")
        result.values[f"{_CORRECTION}.rollout_rs_threshold"] = (bounds, f"{prefix}_threshold")
    normalize = "rollout_is_batch_normalize"
    result.values[f"{_CORRECTION}.{normalize}"] = (values.get(normalize), f"algorithm.{normalize}")
    _veto(result, values.get("rollout_is_veto_threshold"), f"{prefix}_veto_threshold")
    written = ", ".join(f"{key.rpartition('.')[2]}={value[0]}" for key, value in result.values.items() if value[0])
    result.notices.append(
        Notice(prefix, f"{prefix}* is read as {_CORRECTION}: {written or 'no importance weights, no rejection'}.")
    )
    return result


def early_rollout_correction(leaves: Mapping[str, Any]) -> GroupResult:
    """Third generation, first names: rejection by level, a separate lower bound, a veto, `use_policy_gradient`."""
    result = GroupResult()
    rule, bound = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    name, lower, upper = leaves.get(rule), leaves.get(f"{bound}_lower"), leaves.get(bound)
    result.consumed += [key for key in (f"{bound}_lower", *_VETOES) if key in leaves]
    if isinstance(name, str) and name in _REJECTION:
        result.consumed += [rule, bound]
        upper = leaves.get(f"{_CORRECTION}.rollout_is_threshold", 2.0) if upper is None else upper
        bounds = upper if lower is None else f"{lower}_{upper}"
        result.values |= {rule: (_REJECTION[name], f"{rule}={name}"), bound: (bounds, f"{bound}_lower")}
        result.notices.append(Notice(rule, f"{rule}={name} is read as {_REJECTION[name]} with the bounds {bounds}."))
    elif name is not None:
        result.values |= {rule: (name, rule), bound: (upper, bound)}
    for key in _VETOES:
        _veto(result, leaves.get(key), key)
    _pair_of_thresholds(leaves, result)
    if leaves.get(f"{_CORRECTION}.rollout_is") == "geometric" and name is not None:
        weights = f"{_CORRECTION}.rollout_is"
        result.consumed.append(weights)
        message = f"{weights}=geometric is read as null: a geometric mean is no importance weight; the rejection stays."
        result.notices.append(Notice(weights, message))
    for old in ("use_policy_gradient", "use_pure_rollout_correction"):
        key = f"{_CORRECTION}.{old}"
        if key in leaves:
            result.consumed.append(key)
            if leaves[key]:
                result.values[f"{_CORRECTION}.loss_type"] = ("reinforce", key)
                result.notices.append(Notice(key, f"{key} is read as {_CORRECTION}.loss_type=reinforce."))
    result.consumed += [key for key in result.values if key in leaves]
    return result


def _pair_of_thresholds(leaves: Mapping[str, Any], result: GroupResult) -> None:
    """`rollout_is_threshold=lower_upper` drops weights outside the two instead of cutting them."""
    key = f"{_CORRECTION}.rollout_is_threshold"
    threshold = leaves.get(key)
    if isinstance(threshold, str) and "_" in threshold:
        lower, _, upper = threshold.partition("_")
        result.consumed.append(key)
        result.values |= {key: (upper, key), f"{key}_lower": (lower, key)}
        result.notices.append(Notice(key, f"{key}={threshold} is read as {upper} with {key}_lower={lower}."))


def _veto(result: GroupResult, threshold: Any, key: str) -> None:
    """A veto on single tokens is one more rejection rule. That rule is symmetric: it also vetoes tokens that are as
    much more likely."""
    if not isinstance(threshold, int | float) or not 0 < threshold < 1:
        return
    rule, bound = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    limit = round(0.5 * math.log(threshold) ** 2, 4)
    first, first_bound = (result.values.get(name, (None, ""))[0] for name in (rule, bound))
    result.values[rule] = (f"{first},seq_max_k2" if first else "seq_max_k2", key)
    result.values[bound] = (f"{first_bound},{limit}" if first else limit, key)
    message = (
        f"{key}={threshold} is read as the rejection rule seq_max_k2 with the bound {limit}, "
        "which also drops sequences with a token that is as many times more likely."
    )
    result.notices.append(Notice(key, message))


def implied_megatron(leaves: Mapping[str, Any]) -> GroupResult:
    """Lists for a Megatron file set `*.megatron.*` and no strategy, because that file chose the backend."""
    result = GroupResult(consumed=[key for key in ("model_engine",) if key in leaves])
    if leaves.get(f"{_ACTOR}.strategy") is not None:
        return result
    if leaves.get("model_engine") == "megatron":
        result.values[f"{_ACTOR}.strategy"] = ("megatron", "model_engine")
        result.notices.append(Notice("model_engine", f"model_engine=megatron is read as {_ACTOR}.strategy=megatron."))
        return result
    for role in (_ACTOR, "critic"):
        used = next((key for key in leaves if key.startswith(f"{role}.megatron.")), None)
        if used is not None and leaves.get(f"{role}.strategy") is None:
            result.values[f"{role}.strategy"] = ("megatron", used)
            result.notices.append(
                Notice(f"{role}.strategy", f"{used} is set and {role}.strategy is not: it is read as megatron.")
            )
    return result


def streamed_batch(leaves: Mapping[str, Any]) -> GroupResult:
    """Fully asynchronous lists set `data.train_batch_size=0`: a step takes what `require_batches` asks for."""
    key = "data.train_batch_size"
    if leaves.get(key) != 0 or isinstance(leaves[key], bool):
        return GroupResult()
    mini = leaves.get(f"{_ACTOR}.ppo_mini_batch_size", ActorConfig.model_fields["ppo_mini_batch_size"].default)
    batches = leaves.get("async_training.require_batches", AsyncTrainingConfig.model_fields["require_batches"].default)
    if not isinstance(mini, int) or not isinstance(batches, int):
        return GroupResult()
    message = f"{key}=0 is read as {mini * batches}: require_batches={batches} mini-batches of {mini} prompts."
    return GroupResult([key], {key: (mini * batches, f"{key}=0")}, [Notice(key, message)])


def global_micro_batches(leaves: Mapping[str, Any]) -> GroupResult:
    """Micro-batch sizes that count sequences over all devices become sizes on one device."""
    result = GroupResult()
    for old, new in GLOBAL_MICRO_BATCHES.items():
        if old not in leaves:
            continue
        result.consumed.append(old)
        size = leaves[old]
        if size is None:
            continue
        replicas = _data_parallel_size(leaves, old)
        if not isinstance(size, int) or size <= 0 or replicas is None or size % replicas:
            count = "the number of data-parallel ranks" if replicas is None else f"{replicas} data-parallel ranks"
            result.problems.append(
                Problem(
                    old, f"{old}={size} counts sequences over all devices and does not divide by {count}; set {new}."
                )
            )
            continue
        result.values[new] = (size // replicas, old)
        result.notices.append(
            Notice(old, f"{old}={size} over {replicas} data-parallel ranks is read as {new}={size // replicas}.")
        )
    return result


GROUP_RULES: tuple[Callable[[Mapping[str, Any]], GroupResult], ...] = (
    ratio_cap,
    flat_importance_sampling,
    early_rollout_correction,
    implied_megatron,
    streamed_batch,
    global_micro_batches,
)

GLOBAL_MICRO_BATCHES = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ),
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "reward_model.micro_batch_size_per_gpu",
}

# The second generation for the documents: name, typed key, meaning.
FLAT_KEYS = (
    ("rollout_is", "rollout_is", "true: weights at `rollout_is_level`; false: none"),
    ("rollout_is_level", "rollout_is", "token or sequence; geometric is a rejection rule only"),
    ("rollout_is_mode", "rollout_rs", "truncate: no rejection; mask: reject outside the bounds"),
    ("rollout_is_threshold", "rollout_is_threshold", "with mask also the upper bound of `rollout_rs_threshold`"),
    ("rollout_is_threshold_lower", "rollout_rs_threshold", "with mask the lower bound, null: 1 / upper; else unused"),
    ("rollout_is_veto_threshold", "rollout_rs", "seq_max_k2 with the threshold 0.5 x log(veto)^2"),
    ("rollout_is_batch_normalize", "rollout_is_batch_normalize", ""),
)


# What the other rules do, for the documents: written as, read as, why.
GROUP_SPELLINGS = (
    (_RATIO_CAPS[0], f"{_CORRECTION}.rollout_is_threshold", "with `rollout_is=token`; not positive: no weights"),
    (
        f"{_CORRECTION}.rollout_rs=token, sequence, geometric",
        f"{_CORRECTION}.rollout_rs=token_k1, seq_sum_k1, seq_mean_k1",
        "",
    ),
    (f"{_CORRECTION}.rollout_rs_threshold_lower", f"{_CORRECTION}.rollout_rs_threshold=lower_upper", ""),
    (_VETOES[0], f"{_CORRECTION}.rollout_rs", "one more rule, seq_max_k2 with the threshold 0.5 x log(veto)^2"),
    (f"{_CORRECTION}.use_policy_gradient", f"{_CORRECTION}.loss_type=reinforce", ""),
    (f"{_ACTOR}.megatron.*", f"{_ACTOR}.strategy=megatron", "when no strategy is set"),
    ("model_engine=megatron", f"{_ACTOR}.strategy=megatron", "when no strategy is set"),
    ("data.train_batch_size=0", "data.train_batch_size", "`async_training.require_batches` mini-batches"),
)


def _check_flat(level: object, mode: object) -> Problem | None:
    if level not in _REJECTION:
        return Problem(
            "algorithm.rollout_is_level", f"algorithm.rollout_is_level={level}: use one of {', '.join(_REJECTION)}."
        )
    if mode not in ("truncate", "mask"):
        return Problem("algorithm.rollout_is_mode", f"algorithm.rollout_is_mode={mode}: use truncate or mask.")
    if level == "geometric" and mode == "truncate":
        message = (
            "algorithm.rollout_is_level=geometric with rollout_is_mode=truncate has no counterpart: a geometric mean "
            f"is not an importance weight; set {_CORRECTION}.rollout_rs=seq_mean_k1 with rollout_rs_threshold."
        )
        return Problem("algorithm.rollout_is_level", message)
    return None


def _data_parallel_size(leaves: Mapping[str, Any], key: str) -> int | None:
    """Ranks that see different sequences in the role of `key`; None when the sizes do not fit."""
    role = next(
        name for name in (_ACTOR, "actor_rollout_ref.ref", "critic", "reward_model", "") if key.startswith(name)
    )
    role = role or _ACTOR  # the old log-probs of the rollout section are computed by the actor

    def size(*names: str) -> Any:
        return next((leaves[name] for name in names if leaves.get(name) is not None), 1)

    devices = TrainerConfig.model_fields["n_gpus_per_node"].default
    world = size("trainer.nnodes") * leaves.get("trainer.n_gpus_per_node", devices)
    strategy = leaves.get(f"{role}.strategy") or leaves.get(f"{_ACTOR}.strategy")
    if strategy == "megatron":
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        shared = 1
        for name in names:
            shared *= size(f"{role}.megatron.{name}", f"{_ACTOR}.megatron.{name}")
    else:
        shared = size(f"{role}.ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size")
    if not isinstance(world, int) or not isinstance(shared, int) or shared < 1 or world % shared:
        return None
    return world // shared

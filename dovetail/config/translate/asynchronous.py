"""Launch lists of verl's asynchronous trainers: one step off, fully asynchronous, and the modes of its `trainer.v1`.

There a version counts cycles (several updates between two transfers of weights) and prompts are counted over the run;
here everything counts steps, and a step is one update.
"""

from __future__ import annotations

from typing import Any

from dovetail.config.actor import ActorConfig
from dovetail.config.data import DataConfig
from dovetail.config.translate.groups import Translated, Values

_ASYNC = "async_training"
_MODE, _HYBRID = f"{_ASYNC}.mode", "actor_rollout_ref.hybrid_engine"
_BATCH, _STEPS = "data.train_batch_size", "trainer.total_training_steps"
_MINI, _BYPASS = "actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.rollout_correction.bypass_mode"
_BATCHES, _CYCLE = f"{_ASYNC}.require_batches", f"{_ASYNC}.trigger_parameter_sync_step"
_PROMPTS = (f"{_ASYNC}.total_rollout_steps", "actor_rollout_ref.rollout.total_rollout_steps")
_ENGINE_LOG_PROBS = (f"{_ASYNC}.use_rollout_log_probs", "actor_rollout_ref.actor.use_rollout_log_probs")
_PROX_LOG_PROBS = f"{_ASYNC}.compute_prox_log_prob"
_V1, _SAMPLER = "trainer.v1.trainer_mode", "trainer.v1.sampler"
# Mode, and whether engine and trainer share devices.
_V1_MODES = {"sync": ("off", None), "colocate_async": ("fully_async", True), "separate_async": ("fully_async", False)}
_UPDATES_PER_CYCLE = 4
"""verl's default; here a transfer follows every step unless something else is asked for."""

SPELLINGS = (
    (f"{_V1}=colocate_async", f"{_MODE}=fully_async", "with `hybrid_engine=True`; separate_async: False"),
    (f"{_SAMPLER}.max_off_policy_threshold", f"{_ASYNC}.max_staleness", "with an asynchronous `trainer_mode`"),
    (f"{_SAMPLER}.max_off_policy_strategy", f"{_ASYNC}.on_stale", "with an asynchronous `trainer_mode`"),
    (f"{_ENGINE_LOG_PROBS[0]}=False", f"{_ASYNC}.prox=recompute", "True: null"),
    (f"{_PROX_LOG_PROBS}=True", f"{_ASYNC}.prox=recompute", ""),
    (f"{_BATCH}=0", _BATCH, f"`{_BATCHES}` mini-batches, and `{_MODE}=fully_async`; frequencies count cycles"),
    (_PROMPTS[0], _STEPS, "prompts, divided by the batch"),
)
"""What these rules do, for the documents: written as, read as, why."""


def v1_mode(keys: Translated) -> None:
    """`trainer.v1.trainer_mode`, and the bound of its sampler; a version there is a step here."""
    name = keys.leaves.get(_V1)
    if name is None:
        return
    if name not in _V1_MODES:
        return keys.problem(_V1, f"{_V1}={name}: use one of {', '.join(_V1_MODES)}.")
    mode, shared = _V1_MODES[name]
    keys.take(_V1)
    values: Values = {_MODE: (mode, _V1), _HYBRID: (shared, _V1)}
    if mode != "off":
        for old, new in (("max_off_policy_threshold", "max_staleness"), ("max_off_policy_strategy", "on_stale")):
            for key, value in keys.take(f"{_SAMPLER}.{old}").items():
                values[f"{_ASYNC}.{new}"] = (value, key)
    keys.put_all(values)
    written = ", ".join(f"{key}={value}" for key, (value, _) in values.items() if value is not None)
    keys.notice(_V1, f"{_V1}={name} is read as {written}.")


def one_step_off_devices(keys: Translated) -> None:
    """The launch file of this trainer, which lists leave out, gives generation devices of its own."""
    if keys.leaves.get(_MODE) == "one_step_off" and keys.leaves.get(_HYBRID) is None:
        keys.put(_HYBRID, False, f"{_MODE}=one_step_off")


def streamed_batch(keys: Translated) -> None:
    """Fully asynchronous lists set `data.train_batch_size=0`: a step takes what `require_batches` asks for."""
    leaves, notes = keys.leaves, []
    prompts = next(iter(keys.take(*_PROMPTS).values()), None)
    batches = keys.take(_BATCHES).get(_BATCHES)
    batch = leaves.get(_BATCH, DataConfig.model_fields["train_batch_size"].default)
    if batch == 0 and not isinstance(batch, bool):
        mini = leaves.get(_MINI, ActorConfig.model_fields["ppo_mini_batch_size"].default)
        batches = 1 if batches is None else batches
        if not isinstance(mini, int) or not isinstance(batches, int):
            return
        batch = mini * batches
        keys.take(_BATCH)
        keys.put(_BATCH, batch, f"{_BATCH}=0")
        notes.append(f"{_BATCH}=0 is read as {batch}: require_batches={batches} mini-batches of {mini} prompts")
        if leaves.get(_MODE, "fully_async") == "fully_async":
            notes += _count_cycles(keys, batch)
    elif batches not in (None, 1):
        notes.append(f"{_BATCHES}={batches} has no effect: {_BATCH}={batch} is the batch of a step")
    if isinstance(prompts, int) and isinstance(batch, int) and batch > 0:
        if keys.spelling.get(_STEPS) == _STEPS:
            keys.take(_STEPS)  # counted in cycles; the prompts go before it
        keys.put(_STEPS, prompts // batch, "total_rollout_steps")
        notes.append(f"total_rollout_steps={prompts} prompts are {prompts // batch} steps of {batch}")
    if notes:
        keys.notice(_BATCH, f"{'; '.join(notes)}.")


def _count_cycles(keys: Translated, batch: int) -> list[str]:
    """A cycle is `trigger_parameter_sync_step` steps: what counts cycles there counts steps here."""
    leaves = keys.leaves
    cycle = leaves.get(_CYCLE, _UPDATES_PER_CYCLE)
    if not isinstance(cycle, int):
        return []
    keys.put_all({_MODE: ("fully_async", f"{_BATCH}=0"), _CYCLE: (cycle, _CYCLE)})
    if leaves.get(_HYBRID) is None:
        keys.put(_HYBRID, False, f"{_BATCH}=0")
    counted = [key for key in ("trainer.test_freq", "trainer.save_freq", _STEPS) if _is_count(leaves.get(key))]
    counts = keys.take(*counted)
    keys.put_all({key: (count * cycle, key) for key, count in counts.items()})
    return [
        f"a step is one update of {batch} prompts, and weights go to the engines every {cycle} steps, a cycle of "
        f"{batch * cycle} prompts",
        *(f"{key}={count} cycles are {count * cycle} steps" for key, count in counts.items()),
    ]


def old_policy(keys: Translated) -> None:
    """Which log-probs are the old ones, in two switches. Recomputing wins, as it does there."""
    leaves, given = keys.leaves, keys.take(_PROX_LOG_PROBS, *_ENGINE_LOG_PROBS)
    if not given:
        return
    written = ", ".join(f"{key}={value}" for key, value in given.items())
    first = next(iter(given))
    recompute = given.get(_PROX_LOG_PROBS) or any(given.get(key) is False for key in _ENGINE_LOG_PROBS)
    if leaves.get(_MODE) in ("one_step_off", "fully_async") and not recompute and leaves.get(_BYPASS) is False:
        why = "the first takes the engine's log-probs as the old ones, the second recomputes them"
        return keys.problem(_BYPASS, f"{written} and {_BYPASS}=False: {why}; keep one of the two.")
    prox = "recompute" if recompute else None
    keys.put(f"{_ASYNC}.prox", prox, first)
    keys.notice(first, f"{written}: read as {_ASYNC}.prox={prox or 'null'}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


RULES = (v1_mode, one_step_off_devices, streamed_batch, old_policy)

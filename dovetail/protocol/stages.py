"""The stages of a training step as data: which columns each reads and writes. Runs nothing.

A trainer is right when every column a stage reads was written before: `unmet_reads` says so before anything runs, and
`validate_stage` checks the batch in hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.protocol.columns import missing_keys_message
from dovetail.protocol.dataproto import DataProto
from dovetail.protocol.schema import SchemaError, validate


@dataclass(frozen=True)
class Stage:
    """``reads`` must be there, ``may_read`` is used when there; ``writes`` is always added, ``may_write`` by option."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    may_read: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ()


_TOKENS = ("input_ids", "attention_mask", "position_ids")
_MODEL = (*_TOKENS, "responses")
_KNOWN_TO_DATASET = ("raw_prompt", "raw_prompt_ids", "extra_info", "multi_modal_data", "multi_modal_inputs")

_STAGES = (
    Stage("dataset", (), (*_TOKENS, "data_source", "reward_model"), may_write=_KNOWN_TO_DATASET),
    Stage("assign_uid", (), ("uid",)),
    Stage(
        "generate_sequences",
        _TOKENS,
        ("prompts", "responses", "response_mask", *_TOKENS),
        may_read=("raw_prompt_ids", "raw_prompt", "multi_modal_data", "multi_modal_inputs", "uid"),
        may_write=("rollout_log_probs", "weight_version"),
    ),
    Stage(
        "reward_baseline", (*_TOKENS, "data_source", "reward_model"), ("reward_baselines",), may_read=("extra_info",)
    ),
    Stage("compute_rm_score", _MODEL, ("rm_scores",), may_read=("raw_prompt", "multi_modal_inputs")),
    Stage(
        "reward",
        ("prompts", "responses", "attention_mask", "response_mask", "data_source", "reward_model"),
        ("token_level_scores",),
        may_read=("extra_info", "rm_scores", "uid"),
        may_write=("response_str",),
    ),
    Stage(
        "compute_log_prob",
        (*_MODEL, "response_mask"),
        ("old_log_probs", "entropys"),
        may_read=("multi_modal_inputs",),
        may_write=("sum_pi_squared",),
    ),
    Stage("compute_ref_log_prob", (*_MODEL, "response_mask"), ("ref_log_prob",), may_read=("multi_modal_inputs",)),
    Stage("compute_values", (*_MODEL, "response_mask"), ("values",), may_read=("multi_modal_inputs",)),
    Stage(
        "rollout_correction",
        ("old_log_probs", "rollout_log_probs", "response_mask"),
        ("rollout_is_weights",),
        may_write=("response_mask",),
    ),
    Stage(
        "apply_kl_penalty",
        ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"),
        ("token_level_rewards",),
    ),
    # In place of apply_kl_penalty, when the KL term is in the loss or absent.
    Stage("scores_as_rewards", ("token_level_scores",), ("token_level_rewards",)),
    Stage(
        "compute_advantage",
        ("token_level_rewards", "response_mask"),
        ("advantages", "returns"),
        may_read=("values", "uid", "reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights"),
    ),
    Stage("update_critic", (*_MODEL, "response_mask", "values", "returns"), (), may_read=("multi_modal_inputs",)),
    Stage(
        "update_actor",
        (*_MODEL, "response_mask", "advantages"),
        (),
        # Without old_log_probs the update is one optimizer step, whose own log-probs are the old ones.
        may_read=("old_log_probs", "ref_log_prob", "rollout_is_weights", "rollout_log_probs", "multi_modal_inputs"),
    ),
)

STAGES: dict[str, Stage] = {stage.name: stage for stage in _STAGES}


def validate_stage(batch: DataProto, stage: str, *, done: bool = False) -> None:
    """Check what ``stage`` is about to read; with ``done``, what it has written. Optional columns only when there."""
    known = _stage(stage)
    required = dict.fromkeys(known.writes if done else known.reads)
    used = known.may_write if done else known.may_read
    required.update(dict.fromkeys(name for name in used if name in batch))
    try:
        validate(batch, list(required))
    except SchemaError as error:
        raise SchemaError(f"{'after' if done else 'before'} stage {stage!r}: {error}") from None


def stage_columns(batch: DataProto, stage: str, extra: Iterable[str] = ()) -> DataProto:
    """What ``stage`` reads of a batch, and nothing else: the rest need not travel to workers. All meta_info stays.

    ``extra`` are further columns it must have, such as those a user's loss asks for. A missing column fails by name.
    """
    validate_stage(batch, stage)
    known, wanted = _stage(stage), list(extra)
    missing = [name for name in wanted if name not in batch]
    if missing:
        raise SchemaError(f"before stage {stage!r}: {missing_keys_message('the batch', missing, batch.columns)}")
    names = dict.fromkeys([*known.reads, *(name for name in known.may_read if name in batch), *wanted])
    return batch.select(
        batch_keys=[name for name in names if name in batch.tensors],
        non_tensor_batch_keys=[name for name in names if name in batch.non_tensor_batch],
    )


def unmet_reads(stages: Sequence[str], given: Iterable[str] = (), writes: Iterable[str] = ()) -> list[str]:
    """Say which stages of a step would read a column that nothing has written; empty when the order is right.

    ``given`` are columns that are there at the start; ``writes`` are optional columns that this step's options turn on.
    """
    there, options, problems = set(given), set(writes), []
    for name in stages:
        stage = _stage(name)
        missing = [column for column in stage.reads if column not in there]
        if missing:
            problems.append(f"stage {name!r} reads {missing}, which no earlier stage writes")
        there.update(stage.writes)
        there.update(options.intersection(stage.may_write))
    return problems


def _stage(name: str) -> Stage:
    if name not in STAGES:
        raise KeyError(missing_keys_message("the step", [name], STAGES))
    return STAGES[name]

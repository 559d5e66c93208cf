"""The columns and the stages of a training step as data: shapes, dtypes, who reads and who writes them. Runs nothing.

Columns that are not listed are allowed: users add their own. Shapes are symbolic; a symbol has one size in a batch, and
``seq_len = prompt_len + response_len``. Before generation there is no response, so ``seq_len`` is the prompt's length.
A trainer is right when every column a stage reads was written before: `unmet_reads` says so before anything runs, and
`validate_stage` checks the batch in hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.protocol.columns import missing_keys_message
from dovetail.protocol.compare import Column, describe_column
from dovetail.protocol.dataproto import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.protocol.sampling_mask import SAMPLING_MASK

INT = ("int64", "int32")
MASK = ("int64", "int32", "int8", "bool")
# Log-probs and what is made of them are float32: differences of bfloat16 log-probs are mostly rounding.
FLOAT = ("float32",)
OBJECT = ("object", "str")

PROMPT = ("rows", "prompt_len")
RESPONSE = ("rows", "response_len")
SEQUENCE = ("rows", "seq_len")
LISTED = ("rows", "response_len", "channels")


class SchemaError(ValueError):
    """A batch does not hold what the schema says."""


@dataclass(frozen=True)
class ColumnSpec:
    """What a column must look like. ``shapes`` lists the shapes it may have; ``channels`` is any size."""

    name: str
    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[str, ...]
    writer: str
    meaning: str

    @property
    def is_tensor(self) -> bool:
        return self.dtypes is not OBJECT

    def describe(self, sizes: Mapping[str, int] | None = None) -> str:
        """``float32[rows=8, response_len=512]``, with the sizes that are known."""
        known = sizes or {}
        shapes = (
            f"[{', '.join(f'{dim}={known[dim]}' if dim in known else dim for dim in shape)}]" for shape in self.shapes
        )
        return "|".join(self.dtypes) + " or ".join(shapes)


def _column(name: str, shape: tuple[str, ...], dtypes: tuple[str, ...], writer: str, meaning: str) -> ColumnSpec:
    return ColumnSpec(name, (shape,), dtypes, writer, meaning)


_SPECS = (
    # The prompt, from the dataset; generate_sequences writes the first three again, for prompt and response.
    _column("input_ids", SEQUENCE, INT, "dataset", "token ids: left-padded prompt, then right-padded response"),
    _column("attention_mask", SEQUENCE, MASK, "dataset", "1 on real tokens, 0 on padding"),
    ColumnSpec(
        "position_ids",
        (SEQUENCE, ("rows", "channels", "seq_len")),
        INT,
        "dataset",
        "position of each token from the first real one; one channel per axis for multimodal rotary positions",
    ),
    _column("uid", ("rows",), OBJECT, "assign_uid", "one id per prompt: rows that share it form a group"),
    _column("data_source", ("rows",), OBJECT, "dataset", "name of the data set; picks the reward function"),
    _column("reward_model", ("rows",), OBJECT, "dataset", "dict with the ground truth of the prompt (ground_truth)"),
    _column("extra_info", ("rows",), OBJECT, "dataset", "dict of anything else the reward function wants"),
    _column("raw_prompt", ("rows",), OBJECT, "dataset", "the prompt as chat messages"),
    _column("raw_prompt_ids", ("rows",), OBJECT, "dataset", "the prompt's token ids without padding, as a list"),
    _column(
        "multi_modal_data", ("rows",), OBJECT, "dataset", "dict of raw images or videos, for engines that read them"
    ),
    _column("multi_modal_inputs", ("rows",), OBJECT, "dataset", "dict of processed tensors, for models"),
    # Generation.
    _column("prompts", PROMPT, INT, "generate_sequences", "token ids of the prompt, left-padded"),
    _column("responses", RESPONSE, INT, "generate_sequences", "token ids of the response, right-padded"),
    _column(
        "response_mask", RESPONSE, MASK, "generate_sequences", "1 on tokens the policy sampled, 0 on padding and tools"
    ),
    _column(
        "rollout_log_probs", RESPONSE, FLOAT, "generate_sequences", "log-probs of the sampled tokens, by the engine"
    ),
    _column(
        "weight_version",
        RESPONSE,
        INT,
        "generate_sequences",
        "version of the weights that sampled the token, else -1",
    ),
    _column(
        SAMPLING_MASK,
        ("rows",),
        OBJECT,
        "generate_sequences",
        "int32[2, kept]: places in the response, and the ids that filtering left there (rollout.keep_sampling_mask)",
    ),
    _column(
        ROUTED_EXPERTS,
        ("rows",),
        OBJECT,
        "generate_sequences",
        "uint8 or int16[tokens, layers, k]: experts of each token of prompt and response (actor.router_replay); with "
        "R2 compute_log_prob writes it",
    ),
    # Rewards.
    _column("rm_scores", RESPONSE, FLOAT, "compute_rm_score", "reward model's score, on the last response token"),
    _column("token_level_scores", RESPONSE, FLOAT, "reward", "reward per token before the KL penalty"),
    _column("response_str", ("rows",), OBJECT, "reward", "the response as text, None where it could not be scored"),
    _column("reward_baselines", ("rows",), FLOAT, "reward_baseline", "score of the greedy response (ReMax)"),
    _column("token_level_rewards", RESPONSE, FLOAT, "apply_kl_penalty", "reward per token that advantages are made of"),
    # Log-probs and values.
    _column("old_log_probs", RESPONSE, FLOAT, "compute_log_prob", "log-probs by the trainer, before the update"),
    _column("entropys", RESPONSE, FLOAT, "compute_log_prob", "entropy of the policy at each response token"),
    _column("sum_pi_squared", RESPONSE, FLOAT, "compute_log_prob", "sum of squared probabilities over the vocabulary"),
    _column("ref_log_prob", RESPONSE, FLOAT, "compute_ref_log_prob", "log-probs by the reference model"),
    _column(
        "teacher_top_ids", LISTED, INT, "compute_ref_log_prob", "the teacher's most likely tokens (distill.kl=top_k)"
    ),
    _column("teacher_top_log_probs", LISTED, FLOAT, "compute_ref_log_prob", "their log-probs by the teacher"),
    _column(
        "teacher_hidden",
        LISTED,
        (*FLOAT, "bfloat16"),
        "compute_ref_log_prob",
        "the teacher's hidden states (distill.kl=full)",
    ),
    _column("values", RESPONSE, FLOAT, "compute_values", "critic's value before each response token"),
    _column(
        "rollout_is_weights",
        RESPONSE,
        FLOAT,
        "rollout_correction",
        "truncated importance weights, trainer over engine",
    ),
    _column(
        "interpolation_weights",
        RESPONSE,
        FLOAT,
        "prox_weights",
        "where old log-probs are between the engine's (0) and the update's (1)",
    ),
    # Advantages.
    _column("advantages", RESPONSE, FLOAT, "compute_advantage", "advantage of each response token"),
    _column("returns", RESPONSE, FLOAT, "compute_advantage", "target of the critic at each response token"),
    _column(
        "loss_weight",
        ("rows",),
        FLOAT,
        "compute_advantage",
        "share of its trajectory's trained tokens that a row holds; absent where each row is a trajectory",
    ),
)

COLUMNS: dict[str, ColumnSpec] = {spec.name: spec for spec in _SPECS}


def validate(batch: DataProto, columns: Sequence[str] | None = None) -> None:
    """Check columns against the schema and raise one `SchemaError` that lists everything wrong.

    ``columns`` must be there; None checks the known columns that are there. `dovetail.protocol.schema` checks a stage.
    """
    present = batch.columns
    names = [name for name in present if name in COLUMNS] if columns is None else list(columns)
    sizes: dict[str, int] = {"rows": len(batch)}
    problems: list[str] = []
    for name in names:
        if name not in COLUMNS:
            problems.append(f"column {name!r} is not in the schema; declare it in dovetail.protocol.schema")
        elif name not in present:
            spec = COLUMNS[name]
            problems.append(f"column {name!r} is missing; {spec.writer} writes it as {spec.describe(sizes)}")
        else:
            problems.extend(_check_column(COLUMNS[name], present[name], sizes))
    if not problems:
        problems.extend(_check_lengths(sizes))
    if problems:
        raise SchemaError("; ".join(problems) + ".")


def _check_column(spec: ColumnSpec, column: Column, sizes: dict[str, int]) -> list[str]:
    wanted = f"expected {spec.describe(sizes)} (written by {spec.writer})"
    if spec.is_tensor != isinstance(column, torch.Tensor):
        where = "a tensor in batch" if spec.is_tensor else "a numpy column in non_tensor_batch"
        return [f"column {spec.name!r} must be {where}, found {describe_column(column)}; {wanted}"]
    shape = next((shape for shape in spec.shapes if _fits(shape, tuple(column.shape), sizes)), None)
    if shape is None or _dtype_name(column) not in spec.dtypes:
        return [f"column {spec.name!r}: found {describe_column(column)}, {wanted}"]
    sizes.update({dim: size for dim, size in zip(shape, column.shape, strict=True) if dim != "channels"})
    return []


def _check_lengths(sizes: Mapping[str, int]) -> list[str]:
    if {"prompt_len", "response_len", "seq_len"} <= sizes.keys():
        prompt, response, sequence = sizes["prompt_len"], sizes["response_len"], sizes["seq_len"]
        if prompt + response != sequence:
            return [f"prompt_len={prompt} and response_len={response} do not add up to seq_len={sequence}"]
    return []


def _fits(symbols: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    same_rank = len(symbols) == len(shape)
    return same_rank and all(sizes.get(dim, size) == size for dim, size in zip(symbols, shape, strict=True))


def _dtype_name(column: Column) -> str:
    if isinstance(column, np.ndarray) and column.dtype.kind in "US":
        return "str"
    return str(column.dtype).removeprefix("torch.")


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
_TEACHER = ("teacher_top_ids", "teacher_top_log_probs", "teacher_hidden")
_KNOWN_TO_DATASET = ("raw_prompt", "raw_prompt_ids", "extra_info", "multi_modal_data", "multi_modal_inputs")

_STAGES = (
    Stage("dataset", (), (*_TOKENS, "data_source", "reward_model"), may_write=_KNOWN_TO_DATASET),
    Stage("assign_uid", (), ("uid",)),
    Stage(
        "generate_sequences",
        _TOKENS,
        ("prompts", "responses", "response_mask", *_TOKENS),
        may_read=("raw_prompt_ids", "raw_prompt", "multi_modal_data", "multi_modal_inputs", "uid"),
        may_write=("rollout_log_probs", "weight_version", SAMPLING_MASK, ROUTED_EXPERTS),
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
        may_read=("multi_modal_inputs", SAMPLING_MASK, ROUTED_EXPERTS),
        may_write=("sum_pi_squared", ROUTED_EXPERTS),
    ),
    Stage(
        "compute_ref_log_prob",
        (*_MODEL, "response_mask"),
        ("ref_log_prob",),
        may_read=("multi_modal_inputs", SAMPLING_MASK),
        may_write=_TEACHER,
    ),
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
    # In place of compute_log_prob and rollout_correction, with async_training.prox=loglinear.
    Stage("prox_weights", ("weight_version",), ("interpolation_weights",)),
    # In place of apply_kl_penalty, when the KL term is in the loss or absent.
    Stage("scores_as_rewards", ("token_level_scores",), ("token_level_rewards",)),
    Stage(
        "compute_advantage",
        ("token_level_rewards", "response_mask"),
        ("advantages", "returns"),
        may_read=("values", "uid", "reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights"),
        may_write=("loss_weight",),
    ),
    Stage(
        "update_critic",
        (*_MODEL, "response_mask", "values", "returns"),
        (),
        may_read=("multi_modal_inputs", "loss_weight"),
    ),
    Stage(
        "update_actor",
        (*_MODEL, "response_mask", "advantages"),
        (),
        # Without old_log_probs the update is one optimizer step, whose own log-probs are the old ones. Of several steps
        # this may hold for the first: the column has NaN in its rows, and the update returns theirs.
        may_read=(
            "old_log_probs",
            "ref_log_prob",
            "rollout_is_weights",
            "rollout_log_probs",
            "interpolation_weights",
            "multi_modal_inputs",
            "loss_weight",
            SAMPLING_MASK,
            ROUTED_EXPERTS,
            *_TEACHER,
        ),
        may_write=("old_log_probs",),
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

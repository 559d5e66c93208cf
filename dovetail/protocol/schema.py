"""The columns of a training step as data: name, shape, dtype, writer, meaning. `validate` checks a batch against them.

Columns that are not listed are allowed: users add their own. Shapes are symbolic; a symbol has one size in a batch, and
``seq_len = prompt_len + response_len``. Before generation there is no response, so ``seq_len`` is the prompt's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.protocol.columns import Column, describe_column
from dovetail.protocol.dataproto import DataProto

INT = ("int64", "int32")
MASK = ("int64", "int32", "int8", "bool")
# Log-probs and what is made of them are float32: differences of bfloat16 log-probs are mostly rounding.
FLOAT = ("float32",)
OBJECT = ("object", "str")

PROMPT = ("rows", "prompt_len")
RESPONSE = ("rows", "response_len")
SEQUENCE = ("rows", "seq_len")


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
    _column("values", RESPONSE, FLOAT, "compute_values", "critic's value before each response token"),
    _column(
        "rollout_is_weights",
        RESPONSE,
        FLOAT,
        "rollout_correction",
        "truncated importance weights, trainer over engine",
    ),
    # Advantages.
    _column("advantages", RESPONSE, FLOAT, "compute_advantage", "advantage of each response token"),
    _column("returns", RESPONSE, FLOAT, "compute_advantage", "target of the critic at each response token"),
)

COLUMNS: dict[str, ColumnSpec] = {spec.name: spec for spec in _SPECS}


def validate(batch: DataProto, columns: Sequence[str] | None = None) -> None:
    """Check columns against the schema and raise one `SchemaError` that lists everything wrong.

    ``columns`` must be there; None checks the known columns that are there. `dovetail.protocol.stages` checks a stage.
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

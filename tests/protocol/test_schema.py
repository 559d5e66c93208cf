"""The schema of columns and the stages of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.protocol import COLUMNS, STAGES, DataProto, SchemaError, unmet_reads, validate, validate_stage

pytestmark = pytest.mark.unit

ROWS, PROMPT, RESPONSE = 4, 3, 5
SIZES = {"rows": ROWS, "prompt_len": PROMPT, "response_len": RESPONSE, "seq_len": PROMPT + RESPONSE, "channels": 3}

PPO = (
    "dataset",
    "assign_uid",
    "generate_sequences",
    "compute_rm_score",
    "reward",
    "compute_log_prob",
    "rollout_correction",
    "compute_ref_log_prob",
    "compute_values",
    "apply_kl_penalty",
    "compute_advantage",
    "update_critic",
    "update_actor",
)


def full_batch() -> DataProto:
    """A batch with every column of the schema, as after compute_advantage."""
    data = {}
    for spec in COLUMNS.values():
        shape = tuple(SIZES[dim] for dim in spec.shapes[0])
        if spec.is_tensor:
            data[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtypes[0]))
        else:
            data[spec.name] = np.full(shape, "x", dtype=object)
    return DataProto.from_single_dict(data)


def changed(name: str, value: object) -> DataProto:
    columns = full_batch().columns
    return DataProto.from_single_dict({**columns, name: value})


def test_a_right_batch_passes_every_stage() -> None:
    batch = full_batch()
    validate(batch)
    for stage in STAGES:
        validate_stage(batch, stage)
        validate_stage(batch, stage, done=True)


def test_stages_use_only_columns_of_the_schema_and_every_column_has_a_stage_that_writes_it() -> None:
    for stage in STAGES.values():
        named = {*stage.reads, *stage.writes, *stage.may_read, *stage.may_write}
        assert named <= COLUMNS.keys(), stage.name
    for spec in COLUMNS.values():
        writer = STAGES[spec.writer]
        assert spec.name in (*writer.writes, *writer.may_write), spec.name
        assert spec.meaning


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "old_log_probs",
            torch.zeros(ROWS, 7),
            r"'old_log_probs': found float32\[4, 7\], expected float32\[rows=4, response_len=5\] .written by comp",
        ),
        (
            "old_log_probs",
            torch.zeros(ROWS, RESPONSE, dtype=torch.bfloat16),
            r"found bfloat16\[4, 5\], expected float32\[",
        ),
        ("responses", torch.zeros(ROWS, RESPONSE), r"'responses': found float32\[4, 5\], expected int64\|int32\["),
        ("uid", torch.zeros(ROWS), r"'uid' must be a numpy column in non_tensor_batch, found float32\[4\]"),
        ("values", np.zeros((ROWS, RESPONSE)), r"'values' must be a tensor in batch, found float64\[4, 5\]"),
        (
            "position_ids",
            torch.zeros(ROWS, 3, 9, dtype=torch.int64),
            r"\[rows=4, seq_len=8\] or \[rows=4, channels,",
        ),
        (
            "prompts",
            torch.zeros(ROWS, 2, dtype=torch.int64),
            r"prompt_len=2 and response_len=5 do not add up to seq",
        ),
    ],
)
def test_wrong_columns_are_named_with_what_was_found_and_expected(name: str, value: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        validate(changed(name, value))


def test_positions_may_have_channels_and_ids_may_be_numpy_strings() -> None:
    validate(changed("position_ids", torch.zeros(ROWS, 3, PROMPT + RESPONSE, dtype=torch.int64)))
    validate(changed("uid", np.array(["a", "b", "c", "d"])))


def test_all_problems_are_reported_at_once() -> None:
    batch = changed("advantages", torch.zeros(ROWS, RESPONSE, dtype=torch.float64))
    batch.pop(["returns"])
    with pytest.raises(SchemaError) as error:
        validate(batch, ["advantages", "returns", "adventages"])
    assert "'advantages': found float64[4, 5]" in str(error.value)
    assert "'returns' is missing; compute_advantage writes it as float32[rows=4, response_len]" in str(error.value)
    assert "'adventages' is not in the schema" in str(error.value)


def test_columns_of_users_are_left_alone() -> None:
    validate(changed("my_own", torch.zeros(ROWS, 99, dtype=torch.float16)))


def test_prompts_pass_before_generation_and_a_missing_column_names_the_stage() -> None:
    tokens = torch.zeros(ROWS, PROMPT, dtype=torch.int64)
    batch = DataProto.from_dict({"input_ids": tokens, "attention_mask": tokens, "position_ids": tokens})
    validate_stage(batch, "generate_sequences")
    with pytest.raises(SchemaError, match=r"before stage 'update_actor': column 'responses' is missing"):
        validate_stage(batch, "update_actor")
    with pytest.raises(SchemaError, match=r"after stage 'generate_sequences': column 'prompts' is missing"):
        validate_stage(batch, "generate_sequences", done=True)
    with pytest.raises(KeyError, match=r"no 'update_acotr'\. Did you mean update_actor\?"):
        validate_stage(batch, "update_acotr")


def test_optional_columns_are_checked_when_they_are_there() -> None:
    batch = changed("ref_log_prob", torch.zeros(ROWS, RESPONSE + 1))
    with pytest.raises(SchemaError, match="'ref_log_prob'"):
        validate_stage(batch, "update_actor")
    batch.pop(["ref_log_prob"])
    validate_stage(batch, "update_actor")


def test_the_order_of_a_step_is_checked_before_it_runs() -> None:
    assert unmet_reads(PPO, writes=["rollout_log_probs"]) == []
    assert unmet_reads(PPO) == ["stage 'rollout_correction' reads ['rollout_log_probs'], which no earlier stage writes"]
    without_ref = [stage for stage in PPO if stage != "compute_ref_log_prob"]
    (problem,) = unmet_reads(without_ref, writes=["rollout_log_probs"])
    assert problem == "stage 'apply_kl_penalty' reads ['ref_log_prob'], which no earlier stage writes"
    assert unmet_reads(["scores_as_rewards", "compute_advantage"], ["token_level_scores", "response_mask"]) == []


def test_the_documentation_lists_every_column_as_declared() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for spec in COLUMNS.values():
        assert f"| `{spec.name}` | `{spec.describe().replace('|', '/')}` | {spec.writer} | {spec.meaning} |" in text


def test_specs_are_frozen_data() -> None:
    spec = COLUMNS["values"]
    with pytest.raises(AttributeError):
        spec.name = "other"  # pyrefly: ignore [read-only]
    assert replace(spec, name="other").describe() == "float32[rows, response_len]"

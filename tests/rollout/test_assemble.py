"""Prompts and responses become one padded batch; the registry finds engines by name."""

from __future__ import annotations

import pytest
import torch

from dovetail.config.names import ENGINES
from dovetail.protocol.schema import validate
from dovetail.rollout import (
    GenerationResult,
    Response,
    assemble,
    derive_seed,
    get_engine_class,
    register_engine,
)

pytestmark = pytest.mark.unit


def _result(ids: list[int], reason: str = "stop", version: int = 3) -> GenerationResult:
    return GenerationResult("r", 0, ids, [-0.5 * i for i in ids], reason, [version] * len(ids))  # pyrefly: ignore


def test_prompts_are_padded_left_and_responses_right() -> None:
    batch = assemble(
        [[11, 12], [13, 14, 15]], [_result([1, 2, 3]), _result([4], "length")], pad_token_id=0, response_length=4
    )
    validate(batch)
    tensors = batch.batch
    assert tensors is not None
    assert tensors["prompts"].tolist() == [[0, 11, 12], [13, 14, 15]]
    assert tensors["responses"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert tensors["input_ids"].tolist() == [[0, 11, 12, 1, 2, 3, 0], [13, 14, 15, 4, 0, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 3, 3, 3]]
    assert tensors["response_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert tensors["weight_version"].tolist() == [[3, 3, 3, -1], [3, -1, -1, -1]]
    torch.testing.assert_close(tensors["rollout_log_probs"], torch.tensor([[-0.5, -1, -1.5, 0], [-2.0, 0, 0, 0]]))
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "length"]


def test_padding_is_told_apart_from_a_real_token_with_the_same_id() -> None:
    batch = assemble([[0, 5]], [_result([2, 0])], pad_token_id=0, prompt_length=3, response_length=3)
    assert batch.batch is not None
    assert batch.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0]]


def test_tokens_the_model_did_not_write_are_attended_to_but_masked_out() -> None:
    response = (
        Response().with_result(_result([1, 2], version=3)).with_tokens([50, 51]).with_result(_result([6], version=4))
    )
    batch = assemble([[9]], [response], pad_token_id=0)
    assert batch.batch is not None
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 0, 1]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1]]
    assert batch.batch["weight_version"].tolist() == [[3, 3, -1, -1, 4]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, -1.0, 0.0, 0.0, -3.0]]


def test_too_long_a_response_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens, more than response_length=2"):
        assemble([[9]], [_result([1, 2, 3])], pad_token_id=0, response_length=2)


def test_every_response_needs_its_prompt() -> None:
    with pytest.raises(ValueError, match="1 prompts for 2 responses"):
        assemble([[9]], [_result([1]), _result([2])], pad_token_id=0)


class OwnEngine:
    name = "own_engine"


def test_engines_are_found_by_name() -> None:
    assert [get_engine_class(name).name for name in ENGINES] == list(ENGINES)


def test_an_unknown_engine_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"rollout.name='vlm' is no engine; choose from native"):
        get_engine_class("vlm")


def test_an_engine_of_ones_own_is_registered_once_and_imported_when_it_is_asked_for() -> None:
    register_engine("own_engine", "tests.rollout.test_assemble:OwnEngine")
    assert get_engine_class("own_engine") is OwnEngine
    with pytest.raises(ValueError, match=r"'own_engine' is already registered \(tests\.rollout"):
        register_engine("own_engine", "elsewhere:Engine")
    with pytest.raises(ValueError, match=r"'nowhere\.Engine'\): name the class as 'module:Class'"):
        register_engine("absent", "nowhere.Engine")


def test_derived_seeds_depend_on_every_part_and_fit_63_bits() -> None:
    seeds = {derive_seed(run, step, uid) for run in range(3) for step in range(20) for uid in ("a", "b", "1")}
    assert len(seeds) == 180
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1, "2") != derive_seed(1, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 7, "abc") == derive_seed(0, 7, "abc")

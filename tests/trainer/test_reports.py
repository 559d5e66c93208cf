"""What is reported of a step, of validation and of staleness, by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.protocol.schema import unmet_reads
from dovetail.trainer.async_metrics import MOST_LAGS, drift_metrics, staleness_metrics
from dovetail.trainer.base import total_training_steps
from dovetail.trainer.prompt_draws import PromptDraws, stable_seed
from dovetail.trainer.step_metrics import (
    data_metrics,
    memory_metrics,
    throughput_metrics,
    timing_metrics,
    token_counts,
    update_metrics,
)
from dovetail.trainer.val_metrics import pass_at_k, validation_metrics

pytestmark = pytest.mark.unit

# ---- validation ----


def test_mean_best_worst_and_majority_of_four_answers() -> None:
    found = validation_metrics(
        ["math"] * 8,
        ["p"] * 4 + ["q"] * 4,
        {"acc": [1, 0, 0, 1, 0, 0, 0, 1]},
        ["7", "8", "8", "7", "1", "1", "1", "2"],
    )
    assert found["val-core/math/acc/mean@4"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["val-core/math/acc/best@4"] == 1.0
    # p: two votes each, the first drawn (7, right) wins; q: the wrong answer has three votes.
    assert found["val-core/math/acc/maj@4"] == 0.5
    assert found["val-aux/math/acc/worst@4"] == 0.0
    assert found["val-aux/math/acc/std@4"] == pytest.approx((0.5 + 3**0.5 / 4) / 2)
    # Drawing two of four with replacement: p misses with (1/2)^2, q with (3/4)^2.
    assert found["val-aux/math/acc/best@2"] == pytest.approx((3 / 4 + 7 / 16) / 2, abs=0.03)


def test_pass_at_k_is_the_share_of_draws_without_replacement_that_hold_a_right_answer() -> None:
    values = {"acc": [1, 0, 0, 1, 0, 0, 0, 1], "reward": [0.5, 0, 0, 1, 0, 0, 0, 1]}
    found = validation_metrics(["math"] * 8, ["p"] * 4 + ["q"] * 4, values)
    # p: of the 6 pairs only one has no right answer; q: three of them.
    assert found["val-aux/math/acc/pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert found["val-aux/math/acc/pass@4"] == 1.0
    assert not any("reward/pass@" in name for name in found), "a score between 0 and 1 does not pass"
    pairs = list(itertools.combinations([1, 0, 0, 0, 0], 2))
    assert pass_at_k(5, 1, 2) == pytest.approx(np.mean([max(pair) for pair in pairs]))
    assert (pass_at_k(5, 0, 3), pass_at_k(5, 5, 1)) == (0.0, 1.0)


def test_a_prompt_with_an_answer_that_has_no_score_stays_in_the_mean() -> None:
    """Four answers to each of two prompts; one of the second prompt's could not be scored."""
    found = validation_metrics(["a"] * 7, ["1"] * 4 + ["2"] * 3, {"reward": [1.0] * 4 + [0.0] * 3})
    assert found["val-core/a/reward/mean@4"] == 0.5
    assert found["val-core/a/reward/best@4"] == 1.0
    assert found["val-aux/a/reward/best@2"] == 0.5
    assert not any("@3" in name for name in found)


def test_sources_are_reported_apart_and_accuracy_is_the_core_value() -> None:
    values = {"reward": [0.5, 1.5, -1.0], "acc": [0.0, 1.0, 0.0]}
    found = validation_metrics(["a", "a", "b"], ["1", "2", "3"], values)
    assert found == {
        "val-aux/a/reward/mean@1": 1.0,
        "val-core/a/acc/mean@1": 0.5,
        "val-aux/b/reward/mean@1": -1.0,
        "val-core/b/acc/mean@1": 0.0,
    }


def test_without_accuracy_the_reward_is_the_core_value() -> None:
    assert validation_metrics(["a"], ["1"], {"reward": [2.0]}) == {"val-core/a/reward/mean@1": 2.0}


# ---- steps ----


def reported_batch() -> DataProto:
    """Three rows, prompts of width 2 and responses of width 3; the last row could not be scored."""
    attention = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    scores = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    returns = torch.tensor([[1.0, 1.0, 0.0], [3.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    return DataProto.from_dict(
        {
            "attention_mask": attention,
            "responses": torch.zeros(3, 3, dtype=torch.long),
            "response_mask": mask,
            "token_level_scores": scores,
            "reward_failed": torch.tensor([False, False, True]),
            "token_level_rewards": scores - 0.5 * mask,
            "advantages": returns - 2,
            "returns": returns,
            "values": returns,
        }
    )


def test_step_metrics_are_those_of_the_scored_rows() -> None:
    found = data_metrics(reported_batch(), use_critic=True, max_response_length=3)
    assert found["critic/score/mean"] == 2.0
    assert found["critic/score/min"] == 1.0
    assert found["critic/rewards/mean"] == pytest.approx((0.0 + 1.5) / 2)
    assert found["critic/returns/mean"] == pytest.approx((1 + 1 + 3 + 3 + 3) / 5)
    assert found["critic/advantages/max"] == 1.0
    assert found["critic/values/max"] == 3.0
    assert found["critic/vf_explained_var"] == pytest.approx(1.0)
    assert found["response_length/mean"] == 2.0
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert found["response/aborted_ratio"] == 0.0
    assert found["prompt_length/mean"] == pytest.approx(5 / 3)
    assert found["prompt_length/clip_ratio"] == pytest.approx(2 / 3)


def test_an_answer_that_is_filtered_out_keeps_its_place_in_the_mean_score() -> None:
    batch = reported_batch()
    batch.tensors["response_mask"][1] = 0
    found = data_metrics(batch, use_critic=True, max_response_length=3)
    assert found["critic/score/mean"] == 2.0
    assert found["critic/rewards/mean"] == pytest.approx((0.0 + 1.5) / 2)
    assert found["critic/returns/mean"] == 1.0


def test_metrics_of_values_need_a_critic() -> None:
    assert not any(
        "value" in name or "vf_" in name
        for name in data_metrics(reported_batch(), use_critic=False, max_response_length=3)
    )


def test_speed_counts_written_tokens_for_generation_and_all_tokens_elsewhere() -> None:
    tokens, response_tokens = token_counts(reported_batch())
    assert (tokens, response_tokens) == (11, 6)
    found = timing_metrics({"gen": 0.6, "update_actor": 1.1, "reward": 5.0}, tokens, response_tokens)
    assert found["timing_s/reward"] == 5.0
    assert found["timing_per_token_ms/gen"] == pytest.approx(100.0)
    assert found["timing_per_token_ms/update_actor"] == pytest.approx(100.0)
    assert "timing_per_token_ms/reward" not in found
    assert throughput_metrics(2.0, tokens, 2)["perf/throughput"] == pytest.approx(11 / 4)


def test_peaks_of_memory_get_the_names_users_plot() -> None:
    measured = {"memory/peak_allocated_gib": 3.0, "memory/allocated_gib": 1.0, "memory/host_peak_gib": 9.0}
    expected = {"perf/max_memory_allocated_gb": 3.0, "perf/cpu_memory_used_gb": 9.0}
    assert memory_metrics(measured) == expected


def test_memory_is_that_of_the_fullest_role_not_of_the_one_updated_last() -> None:
    critic = DataProto(meta_info={"metrics": {"critic/lr": 0.1, "memory/peak_allocated_gib": [7.0, 9.0]}})
    actor = DataProto(meta_info={"metrics": {"actor/lr": 0.2, "memory/peak_allocated_gib": [8.0, 3.0]}})
    metrics = update_metrics(critic)
    metrics |= update_metrics(actor, metrics)
    assert metrics == {"critic/lr": 0.1, "actor/lr": 0.2, "memory/peak_allocated_gib": 9.0}
    assert memory_metrics(metrics) == {"perf/max_memory_allocated_gb": 9.0}


# ---- draws and steps ----


def prompts(count: int) -> DataProto:
    return DataProto.from_dict(non_tensors={"name": np.array(list("abcdefgh")[:count], dtype=object)})


def test_numbers_and_seeds_do_not_depend_on_how_draws_are_cut_into_batches() -> None:
    whole, parts = PromptDraws(7), PromptDraws(7)
    together = whole.number(prompts(6))
    apart = [parts.number(prompts(2)) for _ in range(3)]
    for name in ("uid", "sampling_seed"):
        cut = [value for part in apart for value in part.non_tensor_batch[name]]
        assert together.non_tensor_batch[name].tolist() == cut
        assert len(set(cut)) == 6


def test_a_resumed_counter_goes_on_where_it_was() -> None:
    first, resumed = PromptDraws(7), PromptDraws(7)
    first.number(prompts(3))
    resumed.num_drawn = first.num_drawn
    expected = first.number(prompts(2)).non_tensor_batch["sampling_seed"]
    assert resumed.number(prompts(2)).non_tensor_batch["sampling_seed"].tolist() == expected.tolist()


def test_seeds_are_the_same_on_every_machine_and_differ_between_runs() -> None:
    assert stable_seed(42, "draw-0") == 4476919697178323166
    assert stable_seed(43, "draw-0") != stable_seed(42, "draw-0")
    assert all(0 <= stable_seed(seed, "x") < 2**63 for seed in range(100))


ROUNDS = {"train_batch_size": 8, "gen_batch_size": 4}
DYNAMIC = {"filter_groups": {"enable": True, "metric": "acc"}}


@pytest.mark.parametrize(
    ("keys", "steps_per_epoch", "expected"),
    [
        ({"trainer": {"total_epochs": 3}, "data": {"train_batch_size": 8}}, 5, 15),
        ({"trainer": {"total_epochs": 3, "total_training_steps": 4}, "data": {"train_batch_size": 8}}, 5, 4),
        # Loader batches of 4 prompts: a step takes at least two of them.
        ({"trainer": {"total_epochs": 2}, "data": ROUNDS, "algorithm": DYNAMIC}, 10, 10),
        ({"trainer": {"total_epochs": 2}, "data": ROUNDS, "algorithm": DYNAMIC}, 1, 2),
        # Without dynamic sampling there are no rounds: a loader batch is a step.
        ({"trainer": {"total_epochs": 2}, "data": ROUNDS}, 10, 20),
    ],
)
def test_steps_of_a_run_are_set_or_follow_from_the_epochs(
    keys: dict[str, Any], steps_per_epoch: int, expected: int
) -> None:
    assert total_training_steps(DovetailConfig(**keys), steps_per_epoch) == expected


# ---- stages ----

START = ("dataset", "assign_uid", "generate_sequences")
LOG_PROBS = ("compute_log_prob", "compute_ref_log_prob", "compute_values")
UPDATES = ("compute_advantage", "update_critic", "update_actor")


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([*START, "reward", "scores_as_rewards", "compute_advantage", "update_actor"], id="one-step-grpo"),
        pytest.param(
            [*START, "reward_baseline", *LOG_PROBS[:1], "reward", "scores_as_rewards", *UPDATES[::2]],
            id="remax",
        ),
        pytest.param(
            [*START, *LOG_PROBS, "reward", "rollout_correction", "apply_kl_penalty", *UPDATES],
            id="ppo-with-everything",
        ),
    ],
)
def test_every_stage_of_the_loop_reads_what_an_earlier_one_wrote(stages: list[str]) -> None:
    assert unmet_reads(stages, writes=["rollout_log_probs"]) == []


def test_names_of_verl_stand_beside_ours_and_hold_its_numbers() -> None:
    found = validation_metrics(["m"] * 4, ["p"] * 4, {"acc": [1, 0, 0, 0]}, ["7", "8", "9", "8"])
    assert {name for name in found if "@4/" in name and name.startswith("val-core")} == {
        f"val-core/m/acc/{kind}@4/{of}" for kind in ("best", "maj") for of in ("mean", "std")
    }
    assert found["val-core/m/acc/best@4"] == 1.0
    assert found["val-aux/m/acc/worst@4/mean"] == pytest.approx(0.25**4, abs=0.01)
    # verl draws with numpy's global generator, seeded with 42 for each prompt and size.
    state = np.random.RandomState(42)
    draws = [state.choice(4, size=4, replace=True) for _ in range(1000)]
    assert found["val-core/m/acc/best@4/mean"] == np.mean([0 in draw for draw in draws])
    assert found["val-core/m/acc/best@4/std"] == pytest.approx(np.std([0 in draw for draw in draws]))


def test_staleness_is_that_of_the_oldest_trained_token() -> None:
    # Step 6 starts from version 5. Padding is -1, a masked token is not trained on.
    versions = torch.tensor([[2, 3, 5, 5], [5, 5, -1, -1], [0, 4, 4, 4], [1, 1, -1, -1]], dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    metrics = staleness_metrics(versions, mask, step=6)
    assert metrics["async/staleness/mean"] == pytest.approx((3 + 0 + 1) / 3)
    assert metrics["async/staleness/max"] == 3
    shares = [metrics[f"async/staleness/lag_{lag}"] for lag in range(MOST_LAGS + 1)]
    assert shares == pytest.approx([4 / 9, 3 / 9, 1 / 9, 1 / 9, 0, 0, 0, 0, 0])
    # The first response alone was generated over an update: from version 2 to 5.
    assert metrics["async/updates_crossed/share"] == pytest.approx(1 / 3)
    assert metrics["async/updates_crossed/max"] == 3


def test_lags_beyond_the_last_are_counted_there() -> None:
    metrics = staleness_metrics(torch.tensor([[0, 1, 12]]), torch.ones(1, 3), step=21)
    assert metrics["async/staleness/lag_8"] == 1.0
    assert metrics["async/staleness/max"] == 20


def test_a_batch_without_trained_tokens_reports_nothing() -> None:
    versions = torch.zeros(2, 3, dtype=torch.int32)
    assert staleness_metrics(versions, torch.zeros(2, 3), step=1) == {}
    assert drift_metrics(torch.zeros(2, 3), torch.zeros(2, 3), versions, torch.zeros(2, 3), step=1) == {}


def test_effective_sample_size_falls_with_unequal_weights() -> None:
    engine = torch.zeros(1, 4)
    versions, mask = torch.tensor([[3, 3, 2, 2]]), torch.tensor([[1, 1, 1, 0]])
    same = drift_metrics(engine, engine, versions, mask, step=4)
    assert same == {"async/effective_sample_size": 1.0, "async/fresh_logprob_diff": 0.0}
    policy = torch.tensor([[0.0, math.log(2.0), math.log(3.0), 50.0]])
    moved = drift_metrics(policy, engine, versions, mask, step=4)
    assert moved["async/effective_sample_size"] == pytest.approx((1 + 2 + 3) ** 2 / (3 * (1 + 4 + 9)))
    assert moved["async/fresh_logprob_diff"] == pytest.approx(math.log(2.0) / 2)
    assert "async/fresh_logprob_diff" not in drift_metrics(policy, engine, versions, mask, step=9)

"""A batch in, columns out: scores on the last token, failed rows marked, too many failures an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.config import DovetailConfig
from dovetail.protocol import DataProto, validate_stage
from dovetail.rewards.build import build_reward_runner
from dovetail.rewards.columns import with_scores
from dovetail.rewards.errors import RewardError
from dovetail.rewards.functions import FunctionSpec, combine_results
from dovetail.rewards.managers import BatchRewardManager, DAPORewardManager
from dovetail.rewards.runner import RewardRunner
from tests.models.tiny import tiny_tokenizer
from tests.rewards import scoring_functions as functions

pytestmark = pytest.mark.unit

WIDTH = 12


def answers(*texts: str, truth: Any = "good", source: str = "toy", **columns: torch.Tensor) -> DataProto:
    """A batch as the engine leaves it: prompts of 2 tokens, responses of `WIDTH`."""
    tokenizer = tiny_tokenizer()
    responses = torch.zeros(len(texts), WIDTH, dtype=torch.long)
    mask = torch.zeros_like(responses)
    for row, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        mask[row, : len(ids)] = 1
    prompts = torch.full((len(texts), 2), 5)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], dim=1),
            **columns,
        },
        {
            "data_source": [source] * len(texts),
            "reward_model": [{"ground_truth": truth} for _ in texts],
            "extra_info": [{"index": row} for row in range(len(texts))],
        },
    )


def runner(*specs: FunctionSpec, **options: Any) -> RewardRunner:
    return RewardRunner(specs, tiny_tokenizer(), **{"timeout_seconds": 1.0, **options})


def test_the_score_is_on_the_last_sampled_token_and_nowhere_else() -> None:
    batch = answers("abc", "abcdef")
    batch.tensors["response_mask"][1, 4:] = 0  # The answer ends in tool output, which the policy did not write.
    validate_stage(batch, "reward")
    with runner(functions.spec_of(functions.length, scale=2.0)) as reward:
        result = reward.score(batch)
    scores = result.columns.tensors["token_level_scores"]
    assert scores[0, 2] == 6.0
    assert scores[1, 3] == 12.0
    assert scores.count_nonzero() == 2
    assert result.solution_strs == ["abc", "abcdef"]
    validate_stage(batch.union(result.columns), "reward", done=True)


def test_a_function_that_fails_for_want_of_a_ground_truth_says_so() -> None:
    with runner(functions.spec_of(functions.needs_truth)) as reward:
        with pytest.raises(RewardError, match=r"(?s)TypeError.*The row has no ground truth.*reward_model.*extra_info"):
            reward.score(answers("12", truth=None))
        with pytest.raises(RewardError) as caught:
            reward.score(answers("12", truth=[1]))
    assert "no ground truth" not in str(caught.value)


def test_a_failed_row_is_marked_and_counted_never_scored() -> None:
    with runner(functions.spec_of(functions.misbehave), num_workers=2, max_failed_share=0.5) as reward:
        result = reward.score(answers("good", "raise", "good", "nan", "good", "sleep"))
    assert result.columns.tensors["reward_failed"].tolist() == [False, True, False, True, False, True]
    assert result.metrics["reward/failed"] == 3
    assert result.metrics["reward/score/mean"] == 0.5
    assert np.isnan(result.columns.non_tensor_batch["score"][[1, 3, 5]]).all()
    assert result.failures[5].kind == "timeout"


def test_too_many_failures_stop_the_run_with_the_first_traceback() -> None:
    with runner(functions.spec_of(functions.misbehave)) as reward, pytest.raises(RewardError) as error:
        reward.score(answers("good", "raise", "raise", "good"))
    assert "of 4 responses could not be scored" in str(error.value)
    assert "at most 20% may fail (reward_model.max_failed_share)" in str(error.value)
    assert "KeyError: 'the judge is unreachable'" in str(error.value)


def test_an_async_function_returns_columns_of_its_own() -> None:
    with runner(functions.spec_of(functions.slow_judge)) as reward:
        pending = reward.submit(answers("good", "bad"))
        result = pending.result()
    assert pending.done()
    assert result.columns.non_tensor_batch["acc"].tolist() == [1.0, 0.0]
    assert result.columns.non_tensor_batch["judge"].tolist() == ["async", "async"]


def test_submitting_does_not_wait() -> None:
    with runner(functions.spec_of(functions.misbehave), max_failed_share=0.9) as reward:
        pending = reward.submit(answers("sleep", "good"))
        assert not pending.done()
        assert pending.result().columns.tensors["reward_failed"].tolist() == [True, False]


def test_the_batch_manager_gives_all_rows_to_one_call() -> None:
    with runner(functions.spec_of(functions.by_batch), manager=BatchRewardManager()) as reward:
        result = reward.score(answers("a", "bb", "ccc"))
    assert result.columns.non_tensor_batch["rows"].tolist() == [3.0, 3.0, 3.0]
    assert result.columns.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 2.0, 3.0]


def test_huge_numbers_and_tensors_of_one_row_cost_no_other_row(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import torch\n"
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    huge = {'score': 1.0, 'pred': 10**400, 'ids': torch.arange(2)}\n"
        "    return [huge, {'score': 0.5, 'pred': 3}, torch.arange(2), 10**400]"
    )
    with runner(FunctionSpec(str(file), "f"), manager=BatchRewardManager(), max_failed_share=0.5) as reward:
        result = reward.score(answers("a", "b", "c", "d"))
    assert result.columns.tensors["reward_failed"].tolist() == [False, False, True, True]
    assert result.columns.non_tensor_batch["pred"].tolist() == [10**400, 3, None, None]
    assert result.columns.non_tensor_batch["ids"][0].tolist() == [0, 1]
    assert "return a number or a dict with 'score'" in result.failures[3].detail


def test_a_batch_function_must_return_one_score_per_row() -> None:
    with (
        runner(functions.spec_of(functions.too_few), manager=BatchRewardManager()) as reward,
        pytest.raises(RewardError, match="too_few returned 1 scores for 2 responses"),
    ):
        reward.score(answers("a", "b"))


def test_a_source_without_a_rule_is_a_sentence_and_no_traceback() -> None:
    spec = FunctionSpec("pkg://dovetail.rewards.registry", "default_compute_score", {})
    with (
        runner(spec) as reward,
        pytest.raises(RewardError, match="there is no reward rule for data_source 'toy'") as error,
    ):
        reward.score(answers("a", "b"))
    assert "Traceback" not in str(error.value)


def test_a_lacking_column_is_not_blamed_on_the_ground_truth() -> None:
    with runner(functions.spec_of(functions.by_column)) as reward, pytest.raises(RewardError) as error:
        reward.score(answers("a", "b", truth=None))
    assert "asks for level; the row has" in str(error.value)
    assert "ground_truth" not in str(error.value)


def test_dapo_punishes_length_in_training_and_leaves_accuracy_alone() -> None:
    manager = DAPORewardManager(max_response_length=12, overlong_buffer_len=4, log_overlong=True)
    batch = answers("a" * 8, "a" * 10, "a" * 12)
    with runner(
        FunctionSpec("pkg://dovetail.rewards.registry", "score_by_rule", {"rule": "exact"}), manager=manager
    ) as r:
        shaped, plain = r.score(batch), r.score(batch, shaped=False)
    assert shaped.columns.non_tensor_batch["score"].tolist() == [0.0, -0.5, -1.0]
    assert shaped.columns.non_tensor_batch["acc"].tolist() == [0.0, 0.0, 0.0]
    assert shaped.metrics["reward/overlong/mean"] == pytest.approx(2 / 3)
    assert plain.columns.non_tensor_batch["score"].tolist() == [0.0, 0.0, 0.0]


def test_rewards_are_added_by_weight_and_stay_visible() -> None:
    specs = (functions.spec_of(functions.length, weight=0.5), functions.spec_of(functions.slow_judge, weight=2.0))
    with runner(*specs) as reward:
        columns = reward.score(answers("good", "bad")).columns.non_tensor_batch
    assert columns["score"].tolist() == [4.0, 1.5]
    assert columns["score/length"].tolist() == [4.0, 3.0]
    assert columns["score/slow_judge"].tolist() == [1.0, 0.0]


def test_functions_of_one_name_keep_their_own_scores() -> None:
    specs = [FunctionSpec("a.py", "score", weight=0.5), FunctionSpec("b.py", "score")]
    combined = combine_results([{"score": 1.0}, {"score": 3.0}], specs)
    assert combined == {"score": 3.5, "score/score_1": 1.0, "score/score_2": 3.0}


def test_reward_model_scores_are_added_and_a_nan_among_them_fails_its_row() -> None:
    rm_scores = torch.zeros(2, WIDTH)
    rm_scores[0, 3], rm_scores[1, 2] = 2.0, float("nan")
    batch = answers("good", "bad", rm_scores=rm_scores)
    with runner(functions.spec_of(functions.length), rm_weight=10.0, max_failed_share=0.5) as reward:
        result = reward.score(batch)
    assert result.columns.tensors["token_level_scores"][0, 3] == 24.0
    assert result.columns.tensors["reward_failed"].tolist() == [False, True]
    with runner(max_failed_share=0.5) as alone:
        assert alone.score(batch).columns.tensors["token_level_scores"].sum(-1).tolist() == [2.0, 0.0]


def test_without_any_way_to_score_there_is_an_error() -> None:
    with runner() as reward, pytest.raises(RewardError, match="no rm_scores"):
        reward.score(answers("good"))


@pytest.mark.parametrize("name", ["uid", "index"])
def test_a_function_may_not_write_the_columns_of_other_stages(tmp_path: Path, name: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        f"def f(data_source, solution_str, ground_truth, extra_info):\n    return {{'score': 1, {name!r}: 2}}"
    )
    with runner(FunctionSpec(str(file), "f")) as reward, pytest.raises(RewardError, match=f"returned {name}"):
        reward.score(answers("good"))


def test_scores_take_the_place_of_a_data_files_columns_of_the_same_name() -> None:
    batch = answers("good", "bad")
    batch.non_tensor_batch |= {"score": np.array([7, 8]), "judge": np.array(["a", "b"]), "level": np.array([1, 2])}
    with runner(functions.spec_of(functions.slow_judge)) as reward:
        batch = with_scores(batch, reward.score(batch).columns)
    columns = batch.non_tensor_batch
    assert columns["score"].tolist() == [1.0, 0.0]
    assert columns["judge"].tolist() == ["async", "async"]
    assert columns["level"].tolist() == [1, 2]


def test_the_runner_is_built_from_the_configuration(tmp_path: Path) -> None:
    manager, function = tmp_path / "manager.py", tmp_path / "function.py"
    manager.write_text(
        "from dovetail.rewards.managers import NaiveRewardManager\n"
        "class Mine(NaiveRewardManager):\n"
        "    def __init__(self, bonus): self.bonus = bonus\n"
        "    def shape(self, answers, outcomes):\n"
        "        return [{**o, 'score': o['score'] + self.bonus} for o in outcomes]\n"
    )
    # In a file of its own: the scoring processes would import torch with the manager.
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):\n"
        "    return scale * (solution_str == ground_truth)\n"
    )
    config = DovetailConfig(
        reward_model={
            "reward_manager_module": {"path": str(manager), "name": "Mine"},
            "reward_kwargs": {"bonus": 0.25, "max_failed_share": 0.0},
        },
        custom_reward_function={"path": str(function), "reward_kwargs": {"scale": 3.0}},
    )
    with build_reward_runner(config, tiny_tokenizer()) as reward:
        assert reward.score(answers("good", "bad")).columns.non_tensor_batch["score"].tolist() == [3.25, 0.25]


def test_a_list_of_weighted_rewards_comes_from_the_configuration() -> None:
    rewards = [{"rule": "exact", "weight": 1.0}, {"rule": "format", "weight": 0.5, "kwargs": {"pattern": "g.*"}}]
    config = DovetailConfig(reward_model={"reward_kwargs": {"rewards": rewards}})
    with build_reward_runner(config, tiny_tokenizer()) as reward:
        columns = reward.score(answers("good", "glad", "bad")).columns.non_tensor_batch
    assert columns["score"].tolist() == [1.5, 0.5, 0.0]
    assert columns["score/format"].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"custom_reward_function": {"path": "missing.py"}},
            "path=missing.py: there is no file",
        ),
        ({"reward_model": {"reward_kwargs": {"rewards": [{"weight": 1}]}}}, "needs either rule or path"),
        ({"reward_model": {"reward_kwargs": {"rewards": ["gsm8k"]}}}, r"rewards\[0\]='gsm8k' must be a mapping"),
        ({"reward_model": {"reward_kwargs": {"rewards": {"rule": "gsm8k"}}}}, "must be a list"),
        ({"reward_model": {"reward_kwargs": {"rewards": [{"rule": "gsm8k", "weight": "x"}]}}}, "a number as weight"),
        ({"reward_model": {"reward_kwargs": {"speed": 1}}}, "does not take .*speed"),
    ],
)
def test_a_wrong_configuration_is_an_error_before_training(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardError, match=words):
        build_reward_runner(DovetailConfig(**sections), tiny_tokenizer())


def test_unknown_data_sources_are_found_before_training() -> None:
    with build_reward_runner(DovetailConfig(), tiny_tokenizer()) as reward:
        reward.check_data_sources(["openai/gsm8k", "dovetail/countdown"])
        with pytest.raises(RewardError, match="no reward rule for data_source 'my_set'"):
            reward.check_data_sources(["openai/gsm8k", "my_set"])

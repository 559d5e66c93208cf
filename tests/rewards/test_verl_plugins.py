"""Files written for verl: reward managers of both its contracts, and reward functions of every kind.

A scoring process with a manager imports torch and transformers, so each contract has one; the rest is asked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.rewards import build, verl_managers
from dovetail.rewards.build import build_reward_runner
from dovetail.rewards.errors import RewardError
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import answers

pytestmark = pytest.mark.unit

MANAGERS = '''
import asyncio
from collections import defaultdict

import torch


class LengthAwareManager:
    """The older contract: built with a tokenizer, called with a batch."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", penalty=0.0):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        self.penalty = penalty

    def __call__(self, data, return_dict=False):
        if "rm_scores" in data.batch.keys():
            return data.batch["rm_scores"]
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            info = item.non_tensor_batch.get("extra_info", {})
            info["seen"] = True
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=info,
            )
            if isinstance(score, dict):
                for key, value in score.items():
                    extra[key].append(value)
                score = score["score"]
            extra["prompt_tokens"].append(int(item.batch["attention_mask"][:prompt_length].sum()))
            reward_tensor[i, length - 1] = score - self.penalty * length
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": extra}
        return reward_tensor


class TokenRewards(LengthAwareManager):
    def __call__(self, data, return_dict=False):
        return {"reward_tensor": torch.ones_like(data.batch["responses"], dtype=torch.float32)}


class LoopManager:
    """The newer contract: one row at a time, async."""

    def __init__(self, config, tokenizer, compute_score=None, reward_router_address=None, reward_model_tokenizer=None):
        self.limit = config.data.max_response_length
        self.tokenizer = tokenizer
        self.compute_score = compute_score

    async def run_single(self, data):
        assert len(data) == 1
        item = data[0]
        width = item.batch["responses"].shape[-1]
        length = int(item.batch["attention_mask"][-width:].sum())
        text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
        if text == "crash":
            raise KeyError("no such judge")
        score = self.compute_score(
            data_source=item.non_tensor_batch["data_source"],
            solution_str=text,
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=item.non_tensor_batch.get("extra_info", {}),
        )
        if asyncio.iscoroutine(score):
            score = await score
        return {"reward_score": score, "reward_extra_info": {"acc": score, "limit": self.limit}}


class NeedsMore:
    def __init__(self, tokenizer, server):
        pass

    def __call__(self, data, return_dict=False):
        return {}


def no_manager(data):
    return {}
'''
FUNCTIONS = """
import asyncio


def plain(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    return float(solution_str == ground_truth) + bonus


def detailed(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}


async def judged(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder with the user's two files."""
    (tmp_path / "managers.py").write_text(MANAGERS)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def config_of(plugins: Path, function: str, manager: str | None = None, **reward_model: Any) -> DovetailConfig:
    module = {"reward_manager_module": {"path": str(plugins / "managers.py"), "name": manager}} if manager else {}
    return DovetailConfig(
        custom_reward_function={"path": str(plugins / "functions.py"), "name": function},
        reward_model={"num_workers": 1, **module, **reward_model},
    )


@pytest.mark.parametrize(
    ("function", "manager"), [("plain", "naive"), ("detailed", "dapo"), ("judged", "naive"), ("batched", "batch")]
)
def test_reward_functions_of_every_kind(plugins: Path, function: str, manager: str) -> None:
    config = config_of(plugins, function, reward_manager=manager)
    with build_reward_runner(config, tiny_tokenizer()) as rewards:
        assert rewards.score(answers("good", "bad")).columns.non_tensor_batch["score"].tolist() == [1.0, 0.0]


def test_a_manager_that_is_called_with_the_batch_and_does_not_change_it(plugins: Path) -> None:
    config = config_of(plugins, "detailed", "LengthAwareManager", reward_kwargs={"penalty": 0.25})
    batch = answers("good", "bad")
    before = batch.tensors["responses"].clone()
    with build_reward_runner(config, tiny_tokenizer()) as rewards:
        result = rewards.score(batch)
    assert [info["index"] for info in batch.non_tensor_batch["extra_info"]] == [0, 1]
    assert not any("seen" in info for info in batch.non_tensor_batch["extra_info"])
    assert torch.equal(batch.tensors["responses"], before)
    scores = result.columns.tensors["token_level_scores"]
    assert (scores[0, 3], scores[1, 2]) == (1.0 - 4 * 0.25, -3 * 0.25)
    assert scores.count_nonzero() == 1
    assert result.columns.non_tensor_batch["acc"].tolist() == [1.0, 0.0]
    assert result.columns.non_tensor_batch["prompt_tokens"].tolist() == [2.0, 2.0]


def scored_here(config: DovetailConfig, batch: DataProto) -> list[dict[str, Any]]:
    """By the function of the scoring processes, in this process."""
    specs = build.reward_specs(config)
    given = build._verl_spec(config, tiny_tokenizer(), specs, {})
    manager, spec = verl_managers.adapt(build._load_manager(config), given)
    calls = [manager.prepare(answer) for answer in manager.read(batch, tiny_tokenizer(), "data_source")]
    columns = {f"{name}s": [call[name] for call in calls] for name in calls[0]}
    return getattr(verl_managers, spec.name)(**columns, **spec.kwargs)


def test_a_manager_for_verl_gets_numbers_from_our_rules(plugins: Path) -> None:
    module = {"path": str(plugins / "managers.py"), "name": "LengthAwareManager"}
    config = DovetailConfig(reward_model={"num_workers": 1, "reward_manager_module": module})
    batch = answers("#### 5", "5", truth="5", source="openai/gsm8k")
    assert [row["score"] for row in scored_here(config, batch)] == [1.0, 0.0]


def test_a_manager_that_takes_one_row_at_a_time(plugins: Path) -> None:
    config = config_of(plugins, "judged", "LoopManager", max_failed_share=0.5)
    with build_reward_runner(config, tiny_tokenizer()) as rewards:
        result = rewards.score(answers("good", "bad", "crash"))
    assert result.columns.tensors["reward_failed"].tolist() == [False, False, True]
    assert result.columns.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.0]
    assert result.columns.non_tensor_batch["limit"].tolist()[:2] == [config.data.max_response_length] * 2
    assert "no such judge" in result.failures[2].detail


def test_rewards_on_several_tokens_are_refused(plugins: Path) -> None:
    with pytest.raises(ValueError, match="rewards on several tokens"):
        scored_here(config_of(plugins, "plain", "TokenRewards"), answers("good", "bad"))


@pytest.mark.parametrize(
    ("manager", "words"), [("NeedsMore", "cannot be made with"), ("no_manager", "must inherit from")]
)
def test_a_manager_that_fits_no_contract_is_an_error_at_the_start(plugins: Path, manager: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        build_reward_runner(config_of(plugins, "plain", manager), tiny_tokenizer())

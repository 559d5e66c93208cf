"""What the trainer does with agents' rows: discounts, metrics, records, validation, groups of unequal sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.algorithms import AdaptiveKLController, FixedKLController
from dovetail.config.algorithm import AlgorithmConfig
from dovetail.dashboard.responses import ResponseFolder, Wish
from dovetail.observability.run_folder import RunFolder
from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import one_row_each, row_totals, turn_numbers
from dovetail.trainer.agent_metrics import agent_metrics
from dovetail.trainer.agent_records import MOST_CHARACTERS, agent_records
from dovetail.trainer.answers import RolloutRows
from dovetail.trainer.batch_math import add_advantages, add_baselines, add_rewards, mask_truncated
from dovetail.trainer.requests import join_answers
from tests.models.tiny import tiny_tokenizer
from tests.rewards.test_runner import answers
from tests.rewards.test_trajectories import column

pytestmark = pytest.mark.unit


def rows(versions: list[list[int]], places: list[tuple[int, int]], **columns: Any) -> DataProto:
    """Of one group; `versions` are -1 where the policy did not sample."""
    version = torch.tensor(versions)
    others = {
        "uid": column(["draw-0"] * len(places)),
        "trajectory": np.array([number for number, _ in places]),
        "segment": np.array([segment for _, segment in places]),
        **{name: column(values) for name, values in columns.items()},
    }
    tensors = {
        "responses": torch.ones_like(version),
        "weight_version": version,
        "response_mask": (version >= 0).long(),
        "token_level_scores": torch.zeros(version.shape),
    }
    return DataProto.from_dict(tensors, others)


def test_rewards_of_later_turns_are_worth_less_in_earlier_ones() -> None:
    batch = rows([[0, -1, 0, 0], [-1, 0, -1, 0], [0, -1, -1, -1]], [(0, 0), (0, 1), (1, 0)])
    assert turn_numbers(batch).tolist() == [[0, 0, 1, 1], [1, 2, 2, 3], [0, 0, 0, 0]]
    batch.tensors["token_level_scores"][0, 3] = 1.0
    batch.tensors["token_level_scores"][1, 3] = 1.0
    discounted, _ = add_rewards(batch, AlgorithmConfig(turn_discount=0.5), FixedKLController(0.0))
    assert one_row_each(discounted).tensors["token_level_scores"].sum(dim=1).tolist() == [2.0, 0.0]
    assert discounted.tensors["token_level_rewards"].sum(dim=1).tolist() == [0.5, 0.125, 0.0]
    same, _ = add_rewards(batch, AlgorithmConfig(), FixedKLController(0.0))
    assert torch.equal(same.tensors["token_level_rewards"], batch.tensors["token_level_scores"])


def test_the_kl_in_the_reward_is_a_mean_over_trajectories() -> None:
    batch = rows([[0, 0, 0], [0, -1, -1], [0, 0, -1]], [(0, 0), (0, 1), (1, 0)])
    log_ratio = torch.tensor([[1.0, 1.0, 1.0], [5.0, 9.0, 9.0], [0.5, 0.5, 9.0]])
    columns = {"old_log_probs": log_ratio, "ref_log_prob": torch.zeros(3, 3)}
    batch.tensors["token_level_scores"][1, 0] = 4.0
    control = AdaptiveKLController(0.1, target_kl=1.0, horizon=10)
    seen, metrics = add_rewards(
        batch.union(DataProto.from_dict(columns)), AlgorithmConfig(use_kl_in_reward=True), control
    )
    expected = torch.tensor([[-0.1, -0.1, -0.1], [3.5, 0.0, 0.0], [-0.05, -0.05, 0.0]])
    torch.testing.assert_close(seen.tensors["token_level_rewards"], expected)
    # (3 + 5) / 4 tokens of the first trajectory and 0.5 of the second; two sequences for the controller, not three.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((2.0 + 0.5) / 2)
    assert control.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_a_group_with_fewer_than_two_graded_trajectories_gets_no_advantage() -> None:
    batch = rows([[0, 0]] * 4, [(0, 0), (1, 0), (1, 1), (2, 0)])
    failed = torch.tensor([False, True, True, True])
    columns = {"reward_failed": failed, "token_level_rewards": torch.ones(4, 2)}
    batch = batch.union(DataProto.from_dict(columns))
    assert not add_advantages(batch, AlgorithmConfig(adv_estimator="grpo"), num_repeat=3).tensors["advantages"].any()


def test_a_truncated_trajectory_is_masked_as_a_whole() -> None:
    ends = {"outcome": ["length", "length", "finished"], "finish_reason": ["stop", "length", "length"]}
    batch, share = mask_truncated(rows([[0, 0]] * 3, [(0, 0), (0, 1), (1, 0)], **ends))
    assert batch.tensors["response_mask"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert share == pytest.approx(2 / 3)


def test_baselines_are_found_by_prompt_where_rows_are_unequal() -> None:
    batch = rows([[0]] * 3, [(0, 0), (0, 1), (1, 0)])
    greedy = rows([[0]] * 2, [(0, 0), (0, 1)])
    greedy.tensors["token_level_scores"][:, 0] = torch.tensor([1.0, 2.0])
    greedy = greedy.union(DataProto.from_dict({"reward_failed": torch.zeros(2, dtype=torch.bool)}))
    assert add_baselines(batch, greedy).tensors["reward_baselines"].tolist() == [3.0, 3.0, 3.0]


def test_prompts_are_joined_with_as_many_rows_as_name_them() -> None:
    prompts = DataProto.from_dict(non_tensors={"uid": column(["a", "b"]), "data_source": column(["x", "y"])})
    answers = DataProto.from_dict({"responses": torch.ones(3, 2)}, {"uid": column(["a", "b", "b"])})
    assert join_answers(prompts, answers, n=2).non_tensor_batch["data_source"].tolist() == ["x", "y", "y"]


def test_prompts_of_different_widths_are_padded_on_the_left() -> None:
    def part(width: int) -> DataProto:
        ids = torch.full((1, width), 7)
        columns = {"prompts": ids, "responses": torch.full((1, 2), 8)}
        return DataProto.from_dict(
            {
                **columns,
                "input_ids": torch.cat(list(columns.values()), dim=1),
                "attention_mask": torch.ones(1, width + 2, dtype=torch.int8),
                "position_ids": torch.arange(width + 2)[None],
            },
            meta_info={"pad_token_id": 9},
        )

    joined = DataProto.concat([part(2), part(4)]).tensors
    assert joined["prompts"].tolist() == [[9, 9, 7, 7], [7, 7, 7, 7]]
    assert joined["input_ids"].tolist() == [[9, 9, 7, 7, 8, 8], [7, 7, 7, 7, 8, 8]]
    assert joined["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert joined["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3]


def test_every_row_of_a_trajectory_shows_its_score() -> None:
    batch = rows([[0, 0]] * 3, [(0, 1), (1, 0), (0, 0)])
    batch.tensors["token_level_scores"][:, 0] = torch.tensor([1.0, 2.0, 4.0])
    assert row_totals(batch, "token_level_scores").tolist() == [5.0, 2.0, 5.0]
    assert one_row_each(batch).tensors["token_level_scores"].sum(dim=1).tolist() == [5.0, 2.0]


def test_rows_of_agents_go_into_a_checkpoint_and_back(tmp_path: Path) -> None:
    columns = {"messages": [[{"role": "user", "content": "hi"}]], "events": [EVENTS], "turn_rewards": [[[0, 0.5]]]}
    batch = rows([[0]], [(0, 0)], outcome=["finished"], **columns)
    batch = batch.union(DataProto.from_dict(non_tensors={"agent_reward": np.array([float("nan")])}))
    batch.save_to_disk(tmp_path / "rows")
    loaded = DataProto.load_from_disk(tmp_path / "rows").non_tensor_batch
    assert {name: loaded[name].tolist() for name in columns} == columns
    assert np.isnan(loaded["agent_reward"]).all()


EVENTS = [
    {"kind": "generate", "turn": 0, "seconds": 1.0},
    {
        "kind": "tool",
        "turn": 0,
        "seconds": 2.0,
        "name": "calculator",
        "arguments": {"expression": "1+1"},
        "result": "2",
        "metrics": {"digits": 1.0},
    },
    {"kind": "tool", "turn": 1, "seconds": 0.5, "name": "calculator", "failure": "timeout", "metrics": {"digits": 2.0}},
    {"kind": "retry", "turn": 1, "name": "calculator", "failure": "no sandbox"},
]


def test_metrics_count_each_trajectory_once() -> None:
    batch = rows(
        [[0]] * 3,
        [(0, 0), (0, 1), (1, 0)],
        outcome=["finished", "finished", "infra"],
        num_turns=[3, 3, 1],
        events=[EVENTS, EVENTS, [{"kind": "loop", "turn": None, "metrics": {"num_turns": 5.0}, "extra_fields": {}}]],
    )
    metrics = agent_metrics(batch)
    assert metrics["loop/num_turns"] == 5.0
    assert metrics["num_turns/mean"] == 2.0
    assert (metrics["num_turns/max"], metrics["num_turns/min"]) == (3.0, 1.0)
    assert metrics["tool_call_counts/mean"] == 1.0
    assert metrics["tool/digits"] == 3.0
    assert metrics["tool_call_counts/failed_share"] == 0.5
    assert metrics["tool_call_counts/retries"] == 1.0
    assert metrics["timing_s/agent_loop/tool_calls/max"] == 2.5
    assert metrics["timing_s/agent_loop/slowest/generate_sequences"] == 1.0
    assert {name: value for name, value in metrics.items() if name.startswith("outcome/")} == {
        "outcome/finished": 0.5,
        "outcome/infra": 0.5,
    }
    assert agent_metrics(rows([[0]], [(0, 0)])) == {}


def test_records_hold_a_conversation_once_and_long_texts_without_their_middle() -> None:
    long = "a" * (2 * MOST_CHARACTERS)
    messages = [{"role": "tool", "content": long}]
    batch = rows([[0]] * 2, [(0, 0), (0, 1)], messages=[messages, messages], events=[EVENTS, EVENTS])
    first, last = agent_records(batch)
    assert first == {}
    assert len(last["messages"][0]["content"]) < 1.1 * MOST_CHARACTERS
    assert last["events"] == EVENTS


def test_the_page_reads_what_the_trainer_records(tmp_path: Path) -> None:
    batch = answers("good", "no", "good")
    mask = batch.tensors["response_mask"]
    places = [(0, 0), (0, 1), (1, 0)]
    tensors = {"advantages": mask.float(), "weight_version": torch.where(mask > 0, 3, -1)}
    tensors["token_level_scores"] = torch.zeros(mask.shape)
    tensors["token_level_scores"][1, 0] = 1.0
    columns = {
        "uid": column(["draw-0"] * 3),
        "trajectory": np.array([number for number, _ in places]),
        "segment": np.array([segment for _, segment in places]),
        "outcome": column(["finished", "finished", "infra"]),
        "num_turns": np.array([2, 2, 1]),
        "events": column([EVENTS, EVENTS, []]),
        "messages": column([[{"role": "user", "content": "hello"}]] * 3),
        "finish_reason": column(["stop"] * 3),
    }
    batch = batch.union(DataProto.from_dict(tensors, columns))
    RunFolder(tmp_path).write_answers(1, RolloutRows(tiny_tokenizer()).of(batch))
    responses = ResponseFolder(tmp_path / "rollouts", Path.resolve)
    page = responses.page(1, Wish(tool="calculator"), first=0, count=9)
    assert page["counts"]["outcomes"] == {"finished": 1, "infra": 1}
    assert page["groups"][0]["scores"] == [1.0, 0.0]
    assert [answer["agent"]["segment"] for answer in page["groups"][0]["answers"]] == [0, 1]
    last = responses.response(1, 1)
    assert last["messages"] == [{"role": "user", "content": "hello"}]
    assert last["events"] == EVENTS
    assert (last["token_mask"], last["token_versions"]) == ([1, 1], [3, 3])

"""Agents' trajectories: scored once, by whoever knows the score, and never scored 0 for what is not their fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.agents.types import GRADED, OUTCOMES
from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import UNGRADED
from dovetail.rewards.answers import trajectory_facts
from dovetail.rewards.errors import RewardError
from dovetail.rewards.managers import BatchRewardManager
from tests.rewards import scoring_functions as functions
from tests.rewards.test_runner import answers, runner

pytestmark = pytest.mark.unit

NAN = float("nan")
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}]


def column(values: Sequence[Any]) -> np.ndarray:
    entries = np.empty(len(values), dtype=object)
    entries[:] = list(values)
    return entries


def trajectories(
    *texts: str, places: list[tuple[int, int]], outcomes: list[str] | None = None, **columns: Sequence[Any]
) -> DataProto:
    """Rows of one group; `places` are each row's trajectory and segment."""
    outcomes = outcomes or ["finished"] * len(texts)
    others: dict[str, Any] = {
        "uid": column(["draw-0"] * len(texts)),
        "trajectory": np.array([number for number, _ in places]),
        "segment": np.array([segment for _, segment in places]),
        "outcome": column(outcomes),
        "num_turns": np.array([2] * len(texts)),
        "agent_reward": np.array(columns.pop("agent_reward", [NAN] * len(texts))),
        "messages": column([MESSAGES] * len(texts)),
        "events": column([[{"kind": "error", "failure": "infra", "result": "no sandbox"}]] * len(texts)),
        **{name: column(values) for name, values in columns.items()},
    }
    return answers(*texts).union(DataProto.from_dict(non_tensors=others))


def test_the_reward_layer_knows_the_outcomes_that_agents_have() -> None:
    assert frozenset(OUTCOMES) - GRADED == UNGRADED


def test_a_trajectory_of_several_rows_is_scored_once_on_its_last_row() -> None:
    batch = trajectories("bad", "good", "good", places=[(0, 0), (0, 1), (1, 0)])
    with runner(functions.spec_of(functions.slow_judge)) as scoring:
        result = scoring.score(batch)
    assert len(result.answers) == 2
    sums = result.columns.tensors["token_level_scores"].sum(dim=1)
    assert sums[0] == 0
    assert sums[1] == sums[2] != 0
    assert result.columns.non_tensor_batch["response_str"].tolist() == [None, "good", "good"]
    assert result.columns.non_tensor_batch["acc"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("whole_batch", [False, True])
def test_rewards_of_agents_are_the_score_and_others_ask_the_function(whole_batch: bool) -> None:
    batch = trajectories("good", "good", "bad", places=[(0, 0), (1, 0), (2, 0)], agent_reward=[0.25, NAN, NAN])
    spec = functions.spec_of(functions.by_batch if whole_batch else functions.slow_judge)
    with runner(spec, **({"manager": BatchRewardManager()} if whole_batch else {})) as scoring:
        result = scoring.score(batch)
    assert result.columns.tensors["token_level_scores"].sum(dim=1).tolist() == (
        [0.25, 4.0, 3.0] if whole_batch else [0.25, 1.0, 0.0]
    )


def test_the_function_is_told_of_the_conversation() -> None:
    batch = trajectories("good", places=[(0, 0)])
    with runner(functions.spec_of(functions.tells_extra_info)) as scoring:
        result = scoring.score(batch)
    said = result.columns.non_tensor_batch
    assert said["final_response"].tolist() == ["good"]
    assert said["ended"].tolist() == ["finished"]
    assert said["turns"].tolist() == [2.0]


def test_the_function_is_told_what_a_loop_for_verl_adds() -> None:
    events = [{"kind": "loop", "metrics": {}, "extra_fields": {"turn_scores": [1.0], "outcome": "mine"}}]
    (facts,) = trajectory_facts(trajectories("good", places=[(0, 0)], events=[events]))
    assert facts["turn_scores"] == [1.0]
    assert (facts["outcome"], facts["final_response"]) == ("finished", "good")


@pytest.mark.parametrize("outcome", sorted(UNGRADED))
def test_what_is_not_the_policys_fault_is_masked_and_counted_and_never_scored(outcome: str) -> None:
    batch = trajectories(
        "good", "good", "bad", "bad", "bad", "bad",
        places=[(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (4, 0)],
        outcomes=[outcome, outcome, "finished", "length", "max_turns", "time_limit"],
        agent_reward=[1.0] * 6,
        turn_rewards=[[(0, 5.0)]] * 6,
    )  # fmt: skip
    with runner(functions.spec_of(functions.slow_judge)) as scoring:
        result = scoring.score(batch)
    assert result.columns.tensors["reward_failed"].tolist() == [True, True, False, False, False, False]
    assert result.columns.tensors["token_level_scores"].sum(dim=1).tolist() == [0, 0, 6.0, 6.0, 6.0, 6.0]
    assert result.metrics["reward/failed"] == 1
    assert result.metrics["reward/failed_share"] == pytest.approx(1 / 5)
    (failure,) = result.failures.values()
    assert (failure.kind, failure.detail) == (outcome, "no sandbox")


def test_a_run_stops_when_too_many_trajectories_of_a_step_broke_off() -> None:
    batch = trajectories(
        "good", "good", "good", places=[(0, 0), (1, 0), (2, 0)], outcomes=["infra", "finished", "finished"]
    )
    with (
        runner(functions.spec_of(functions.slow_judge)) as scoring,
        pytest.raises(RewardError, match=r"1 of 3 .*1 infra"),
    ):
        scoring.score(batch)


def test_turn_rewards_are_at_their_positions_beside_the_score() -> None:
    batch = trajectories("abc", "good", places=[(0, 0), (0, 1)], turn_rewards=[[(1, 0.5)], [(0, 0.25), (3, 2.0)]])
    with runner(functions.spec_of(functions.slow_judge)) as scoring:
        scores = scoring.score(batch).columns.tensors["token_level_scores"]
    assert scores[0].nonzero().flatten().tolist() == [1]
    assert scores[1, :4].tolist() == [0.25, 0, 0, 3.0]


def test_scores_that_were_started_early_are_the_same() -> None:
    batch = trajectories("bad", "good", "bad", places=[(0, 0), (0, 1), (1, 0)])
    with runner(functions.spec_of(functions.slow_judge)) as scoring:
        started = scoring.start(batch)
        early = scoring.submit(batch, started=started).result()
        late = scoring.score(batch)
    assert len(started) == 3
    assert torch.equal(early.columns.tensors["token_level_scores"], late.columns.tensors["token_level_scores"])


def test_agents_that_score_themselves_need_no_function() -> None:
    batch = trajectories("good", places=[(0, 0)], agent_reward=[0.5])
    with runner() as scoring:
        assert scoring.score(batch).columns.tensors["token_level_scores"].sum() == 0.5

"""Whole runs in which responses are conversations: an environment, a user's loop, rows of unequal number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.observability.run_folder import RunFolder
from tests.trainer.test_async_engines import ONE_STEP_OFF
from tests.trainer.test_async_runs import checked_ledger
from tests.trainer.test_learning import LEARNING, mean_of
from tests.trainer.toy_run import Toy, train, train_apart

pytestmark = pytest.mark.e2e

CODE = '''
from dovetail.agents.environments import Environment, Step


class Letters(Environment):
    """The share of ASCII letters in each turn; trajectories have 1, 2 or 3 turns."""

    def reset(self, task):
        self.turns = 0
        self.last = 1 + task.sample % 3

    def step(self, action):
        self.turns += 1
        share = sum(ord(letter) < 128 for letter in action) / max(1, len(action))
        return Step(f"turn {self.turns}", share, self.turns >= self.last)

    def state(self):
        return [self.turns, self.last]

    def restore(self, state):
        self.turns, self.last = state


class ShortTurns:
    """Turns of a few tokens; the third one begins a new row."""

    def __init__(self, tokens):
        self.tokens = tokens

    async def run(self, task, session):
        messages = list(task.messages)
        while True:
            turn = await session.chat(messages, max_new_tokens=self.tokens)
            messages.append(turn.message)
            said = await session.tools.respond(messages, turn)
            session.add_reward(said.reward, turn)
            if said.done:
                return None
            messages.append({"role": "user", "content": said.text})
            if turn.node == 1:
                messages = [messages[0], {"role": "user", "content": "in short"}]
'''


@pytest.fixture
def agent_keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "letters.py"
    file.write_text(CODE)
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: short, _target_: '{file}:ShortTurns', tokens: 4, replays: true}}\n"
    )
    return {
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.agent.environment": f"{file}:Letters",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(tmp_path / "loops.yaml"),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "short",
        "data.max_response_length": 64,
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted((folder / "rollouts").glob("*.jsonl")) for line in file.open()]


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"async_training.mode": "fully_async", "async_training.max_staleness": 1},
    ],
    ids=["sync", "fully_async"],
)
def test_a_run_of_conversations(toy: Toy, tmp_path: Path, agent_keys: dict[str, Any], mode: dict[str, Any]) -> None:
    val = {"data.val_files": str(toy.data / "val.parquet"), "trainer.test_freq": 3}
    result, metrics = train(toy.config(tmp_path / "run", {**agent_keys, **mode, **val}))
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        # Four prompts of four trajectories, with 1, 2, 3 and 1 turns; the third one is two rows.
        assert row["num_turns/mean"] == pytest.approx(7 / 4)
        assert row["num_turns/max"] == 3
        assert row["actor/grad_norm"] > 0
        assert 0 < row["critic/score/mean"] < 3
    rows = rows_of(result.folder)
    assert {row["outcome"] for row in rows} == {"finished"}
    if mode:
        assert checked_ledger(result.folder, bound=1).counts()["trained"] == 12
    assert any(name.startswith("val-") for name in RunFolder(result.folder).read_metrics()[-1])


def test_conversations_go_on_after_a_resume(toy: Toy, tmp_path: Path, agent_keys: dict[str, Any]) -> None:
    """Checkpoints hold conversations that have begun: no turn and no step of the environment happens again."""
    changes = {
        **agent_keys,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 2,
        "async_training.max_in_flight": 8,
        "actor_rollout_ref.rollout.max_num_seqs": 6,
        "trainer.save_freq": 2,
    }
    train(toy.config(tmp_path / "run", {**changes, "trainer.total_training_steps": 2}))
    result, metrics = train(toy.config(tmp_path / "run", {**changes, "trainer.total_training_steps": 5}))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    assert checked_ledger(result.folder, bound=2).counts()["trained"] == 20
    assert [row["num_turns/mean"] for row in metrics] == [pytest.approx(7 / 4)] * 5
    rows = rows_of(result.folder)
    assert len(rows) == 20 * 5
    assert not [event for row in rows for event in row.get("events", ()) if event["kind"] == "restart"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_engines_of_their_own(tmp_path: Path, agent_keys: dict[str, Any]) -> None:
    """On Ray: only there are engines elsewhere, and conversations run on while weights arrive."""
    folder = train_apart(tmp_path / "run", {**ONE_STEP_OFF, **agent_keys}, use_ray=True)
    metrics = RunFolder(folder).read_metrics()
    assert [row["num_turns/mean"] for row in metrics] == [pytest.approx(7 / 4)] * 4
    assert checked_ledger(folder, bound=1).counts()["trained"] == 16


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", pytest.param("token-mean", marks=pytest.mark.slow)])
def test_turns_over_several_rows_learn(toy: Toy, tmp_path: Path, agent_keys: dict[str, Any], mode: str) -> None:
    """Sixteen steps: whether rewards of turns reach the tokens that earned them shows only in a run that learns."""
    file = tmp_path / "letters.py"
    file.write_text(
        CODE + "\n\nclass ThreeTurns(Letters):\n    def reset(self, task):\n        self.turns, self.last = 0, 3\n"
    )
    learning = {**LEARNING, "actor_rollout_ref.actor.loss_agg_mode": mode}
    keys = {**agent_keys, **learning, "actor_rollout_ref.rollout.agent.environment": f"{file}:ThreeTurns"}
    _, rows = train(toy.config(tmp_path / "run", keys))
    first, last = mean_of(rows[:3], "critic/score/mean"), mean_of(rows[-3:], "critic/score/mean")
    assert last > first + 0.5
    assert {row["num_turns/mean"] for row in rows} == {3.0}

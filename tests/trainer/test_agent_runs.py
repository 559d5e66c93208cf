"""Whole runs in which responses are conversations: an environment, a user's loop, rows of unequal number."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.observability.run_folder import RunFolder
from dovetail.trainer.ppo import RayPPOTrainer
from tests.ranks import run_alone
from tests.trainer.test_async_engines import APART
from tests.trainer.test_async_runs import checked_ledger
from tests.trainer.test_learning import LEARNING, mean_of
from tests.trainer.toy_run import Toy, train, train_apart

pytestmark = pytest.mark.e2e

CODE = '''
import asyncio
from pathlib import Path

from dovetail.agents.environments import Environment, Step


class Letters(Environment):
    """The share of ASCII letters in each turn; trajectories have 1, 2 or 3 turns."""

    def reset(self, task):
        self.turns = 0
        self.last = 1 + task.sample % 3

    def step(self, action):
        self.turns += 1
        share = sum(ord(letter) < 128 for letter in action) / max(1, len(action))
        return Step(f"turn {self.turns}", share, self.turns >= self.last, {"letters": share})

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

HELD = '''

class Held(Letters):
    """One conversation has had its first turn before any other goes on, and stays there until `checkpoint` exists."""

    begun, checkpoint = Path(__file__).with_name("begun"), Path("{checkpoint}")

    def reset(self, task):
        super().reset(task)
        self.is_held = (task.uid, task.sample) == ("draw-11", 0)

    async def step(self, action):
        if self.is_held:
            self.begun.touch()
        while not (self.checkpoint if self.is_held else self.begun).exists():
            await asyncio.sleep(0.01)
        return super().step(action)
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
        assert row["tool/letters"] == pytest.approx(row["critic/score/mean"])
    rows = rows_of(result.folder)
    assert {row["outcome"] for row in rows} == {"finished"}
    assert json.loads((result.folder / "chat_template.json").read_text())["append_only"]
    if mode:
        assert checked_ledger(result.folder, bound=1).counts()["trained"] == 12
    assert any(name.startswith("val-") for name in RunFolder(result.folder).read_metrics()[-1])


VERL = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("verl_talk")
class Talk(AgentLoopBase):
    """Three turns of four tokens, with text of a user between them."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        ids, mask = list(prompt), []
        for turn in range(3):
            said = await self.server_manager.generate(
                request_id="one", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 4}
            )
            text = [] if turn == 2 else self.tokenizer.encode(f"turn {turn}")
            ids += said.token_ids + text
            mask += [1] * len(said.token_ids) + [0] * len(text)
        if kwargs["extra_info"]["index"] % 4 == 1:  # what a loop must not do
            mask = [1] * len(mask)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt):], response_mask=mask, num_turns=6, metrics={},
            extra_fields={"share": 0.5},
        )
'''


def test_a_loop_for_verl_in_an_asynchronous_run(toy: Toy, tmp_path: Path) -> None:
    """Rows that it filled wrongly are masked, counted and named; the others are trained on."""
    (tmp_path / "verl_talk.py").write_text(VERL)
    (tmp_path / "loops.yaml").write_text(f"- {{name: verl_talk, _target_: '{tmp_path}/verl_talk.py:Talk'}}")
    changes = {
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(tmp_path / "loops.yaml"),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "verl_talk",
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 1,
        "data.max_response_length": 64,
        "reward_model.max_failed_share": 0.9,
        "trainer.total_training_steps": 2,
    }
    result, metrics = train(toy.config(tmp_path / "run", changes))
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["loop/num_turns"] == 6 for row in metrics)
    rows = rows_of(result.folder)
    assert {row["outcome"] for row in rows} <= {"finished", "length", "tool_error"}
    assert any(1 in row["token_mask"] and 0 in row["token_mask"] for row in rows)
    broken = [event for row in rows for event in row.get("events", ()) if event["kind"] == "error"]
    assert all("response_mask is 1 at position" in event["result"] for event in broken)
    assert 0 < len(broken) == sum(row["outcome"] == "tool_error" for row in rows)


@pytest.mark.parametrize("replays", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_conversations_go_on_after_a_resume(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent_keys: dict[str, Any], replays: bool
) -> None:
    """Checkpoints hold conversations that have begun: no turn and no step of the environment happens again.

    A loop that cannot be replayed begins again, and the ledger says so. Draw 11 is the last one of the first weights
    that steps 1 and 2 can do without, and step 3 needs it.
    """
    run, file = tmp_path / "run", tmp_path / "letters.py"
    file.write_text(CODE + HELD.format(checkpoint=run / "global_step_2"))
    if not replays:
        loops = Path(agent_keys["actor_rollout_ref.rollout.agent.agent_loop_config_path"])
        loops.write_text(loops.read_text().replace("replays: true", "replays: false"))
    changes = {
        **agent_keys,
        "actor_rollout_ref.rollout.agent.environment": f"{file}:Held",
        "async_training.mode": "fully_async",
        "async_training.max_staleness": 2,
        "async_training.max_in_flight": 12,
        "actor_rollout_ref.rollout.max_num_seqs": 6,
        "trainer.save_freq": 2,
        "trainer.total_training_steps": 5,
    }
    config, learn = toy.config(run, changes), RayPPOTrainer.learn

    def killed(self: RayPPOTrainer, rollout: Any) -> Any:
        if self.global_step == 3:
            raise RuntimeError("killed")
        return learn(self, rollout)

    with monkeypatch.context() as patch:
        patch.setattr(RayPPOTrainer, "learn", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    result, metrics = train(config)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    ledger = checked_ledger(result.folder, bound=2)
    assert ledger.counts()["trained"] == 20
    assert [row["num_turns/mean"] for row in metrics] == [pytest.approx(7 / 4)] * 5
    rows = rows_of(result.folder)
    assert len(rows) == 20 * 5
    restarted = [event for row in rows for event in row.get("events", ()) if event["kind"] == "restart"]
    assert len(restarted) == sum(record.restarted for record in ledger.draws.values())
    assert bool(restarted) != replays
    held = ledger.draws[11]
    assert bool(held.restarted) != replays
    assert not replays or min(version for version, count in held.finishes[-1] if count) == 0, "the first turn is kept"


TOOLS = '''
import os
from pathlib import Path

from dovetail.agents import tool

Path(__file__).with_name(f"tools-{os.getpid()}").touch()


@tool
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: which one
    """
    return 2 * number
'''


def train_here(rank: int, world_size: int, folder: Path, toy: Toy, keys: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    return os.getpid(), train(toy.config(folder / "run", keys), use_ray=True)[1][0]


@pytest.mark.slow
@pytest.mark.distributed
def test_environment_loop_and_tools_are_found_by_relative_paths_in_the_workers_of_ray(
    toy: Toy, tmp_path: Path, agent_keys: dict[str, Any]
) -> None:
    """On Ray: only there do conversations run in another process than the one that was given the paths."""
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "loops.yaml").write_text("- {name: short, _target_: 'letters.py:ShortTurns', tokens: 4}\n")
    agent, multi_turn = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
    keys = agent_keys | {
        f"{agent}.environment": "letters.py:Letters",
        f"{agent}.agent_loop_config_path": "loops.yaml",
        f"{multi_turn}.function_tool_path": "tools.py",
        "trainer.total_training_steps": 1,
    }
    driver, metrics = run_alone(train_here, tmp_path, toy, keys, timeout=300.0)
    assert metrics["num_turns/mean"] == pytest.approx(7 / 4)
    assert 0 < metrics["critic/score/mean"] < 3
    assert {file.name for file in tmp_path.glob("tools-*")} - {f"tools-{driver}"}, "a worker has read the file"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_engines_of_their_own(tmp_path: Path, agent_keys: dict[str, Any], mode: str) -> None:
    """On Ray: only there are engines elsewhere, and conversations run on while weights arrive."""
    folder = train_apart(tmp_path / "run", {**APART, **agent_keys, "async_training.mode": mode}, use_ray=True)
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


PROGRAM = """
import json, os, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

task = json.loads(os.environ["DOVETAIL_TASK"])
messages, said = task["messages"], ""
for turn in range(2):
    body = {"model": "policy", "messages": messages, "max_tokens": 4}
    message = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "more"}]
    said += message["content"]
share = sum(ord(letter) < 128 for letter in said) / max(1, len(said))
post(os.environ["DOVETAIL_FINISH_URL"], {"reward": 10 + share})
"""
TOOLBOX = """
from dovetail.agents.tools.functions import FunctionToolbox


class Service(FunctionToolbox):
    def __init__(self, file: str) -> None:
        super().__init__([])
        self.file = file

    async def close(self) -> None:
        open(self.file, "a").write("closed")
"""


def test_a_program_is_trained_over_its_endpoint(toy: Toy, tmp_path: Path) -> None:
    """A whole run, because here alone a program, the endpoint, the engine's stream and the trainer meet.

    Tools are closed when the run is over.
    """
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "service.py").write_text(TOOLBOX)
    (tmp_path / "tools.yaml").write_text(
        f"tools: [{{class_name: '{tmp_path}/service.py:Service', config: {{file: {tmp_path}/log}}}}]"
    )
    keys = {
        "actor_rollout_ref.rollout.agent.command": f"{sys.executable} {tmp_path / 'agent.py'}",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": str(tmp_path / "tools.yaml"),
        "actor_rollout_ref.rollout.n": 2,
        "data.train_batch_size": 2,
        "data.max_response_length": 48,
        "trainer.total_training_steps": 2,
    }
    result, metrics = train(toy.config(tmp_path / "run", keys))
    assert [row["num_turns/mean"] for row in metrics] == [2.0, 2.0]
    assert all(10 < row["critic/score/mean"] < 11 and row["actor/grad_norm"] > 0 for row in metrics)
    assert {row["outcome"] for row in rows_of(result.folder)} == {"finished"}
    assert (tmp_path / "log").read_text() == "closed"

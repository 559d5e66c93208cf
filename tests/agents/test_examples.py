"""The environments in examples/agents, played by scripts that know the game."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dovetail.agents import Task
from dovetail.agents.tools.load import load_toolbox
from dovetail.agents.types import ToolCall, ToolResult
from dovetail.config.user_code import load_user_object

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parents[2] / "examples" / "agents"


async def opened(name: str, task: Task, state: Any = None) -> tuple[Any, str]:
    toolbox = load_toolbox(environment=f"{FOLDER / name}")
    assert toolbox is not None
    tools, messages = await toolbox.open(task, state)
    return tools, messages[0]["content"]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("uid", ["a", "b", "c", "d"])
async def test_halving_finds_the_number_and_a_restored_game_goes_on(uid: str) -> None:
    task = Task([], {"extra_info": {"largest": 100}}, uid=uid)
    game, _ = await opened("number_guessing.py:NumberGuessing", task)
    low, high, rewards = 1, 100, []
    while True:
        game, _ = await opened("number_guessing.py:NumberGuessing", task, game.state())
        guess = (low + high) // 2
        result: ToolResult = await game.respond(say(f"I guess {guess}"))
        rewards.append(result.reward)
        if result.done:
            break
        low, high = (guess + 1, high) if result.text == "Higher." else (low, guess - 1)
    assert result.text == "Right!"
    assert sum(rewards) == pytest.approx(1.0 - 0.05 * (len(rewards) - 1))


async def test_guesses_without_number_or_sense_cost_and_end_the_game() -> None:
    game, _ = await opened("number_guessing.py:NumberGuessing", Task([], uid="a"))
    results = [await game.respond(say(text)) for text in ["hm", *["guess 1000"] * 9]]
    assert [result.reward for result in results[:3]] == [-0.1, -0.05, -0.05]
    assert [result.done for result in results] == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("eagle", "apple", "-Y-GG"),
        ("sheep", "eagle", "--YY-"),
        ("geese", "eagle", "YY--G"),
    ],
)
def test_letters_are_coloured_as_often_as_they_are_there(guess: str, word: str, marks: str) -> None:
    assert load_user_object(str(FOLDER / "wordle.py"), "colour", key="test")(guess, word) == marks


async def test_wordle_is_won_lost_and_restored() -> None:
    task = Task([], {"extra_info": {"word": "eagle"}})
    game, _ = await opened("wordle.py:Wordle", task)
    assert (await game.respond(say("[apple]"))).text == "Y--GG"
    assert await game.reward() == pytest.approx(0.24)
    game, _ = await opened("wordle.py:Wordle", task, game.state())
    assert (await game.respond(say("no idea"))).text == "Write one word of five letters in brackets."
    won = await game.respond(say("then [eagle]"))
    assert (won.done, won.metrics["guesses"], await game.reward()) == (True, 3.0, 1.0)
    lost, _ = await opened("wordle.py:Wordle", task)
    results = [await lost.respond(say("[apple]")) for _ in range(6)]
    assert results[-1].text == "Y--GG. It was eagle."
    assert [result.done for result in results] == [False] * 5 + [True]


def test_a_word_problem_is_calculated_and_answered() -> None:
    async def play(*calls: ToolCall) -> tuple[list[ToolResult], float]:
        desk, text = await opened("word_problems.py:WordProblem", Task([], {"reward_model": {"ground_truth": "1,018"}}))
        assert "`calculate`" in text
        return [await desk.call(call) for call in calls], await desk.reward()

    calculate = ToolCall("calculate", {"expression": "1000 + 9 * 2"})
    results, reward = asyncio.run(play(calculate, ToolCall("answer", {"number": "1018"})))
    assert [result.text for result in results] == ["1018", ""]
    assert (results[1].done, results[1].metrics, reward) == (True, {"calculations": 1.0}, 1.0)
    assert asyncio.run(play(ToolCall("answer", {"number": 3})))[1] == 0.1
    assert asyncio.run(play(calculate))[1] == 0.0


WALK = ["go north", "take key", "open chest", "go south", "go east", "take key", "open chest", "go up", "take key"]
WALK += ["open chest", "go down", "open chest", "go west", "open chest", "go north", "open chest"]


@pytest.mark.parametrize("uid", ["a", "b", "c"])
async def test_walking_through_the_house_finds_the_key_and_a_restored_game_goes_on(uid: str) -> None:
    task, results = Task([], uid=uid), []
    game, text = await opened("text_adventure.py:TextAdventure", task)
    assert "You are in the hall." in text
    for action in WALK:
        game, _ = await opened("text_adventure.py:TextAdventure", task, game.state())
        results.append(await game.respond(say(action)))
        if results[-1].done:
            break
    assert sum("You have the key." in result.text for result in results) == 1
    assert results[-1].done
    assert game.state()["moves"] <= 15


async def test_the_tools_of_the_yaml_are_a_sandboxed_python_and_a_calculator() -> None:
    toolbox = load_toolbox(tool_config_path=str(FOLDER / "python.yaml"))
    assert toolbox is not None
    tools, _ = await toolbox.open(Task([]))
    calls = [ToolCall("python", {"code": "sum(range(5))"}), ToolCall("calculator", {"expression": "2*5"})]
    assert [(await tools.call(call)).text for call in calls] == ["10", "10"]


async def test_a_program_is_run_and_the_number_after_it_is_the_answer() -> None:
    toolbox = load_toolbox(environment=f"{FOLDER / 'python_blocks.py'}:PythonBlocks")
    assert toolbox is not None
    task = Task([], {"reward_model": {"ground_truth": "1,234"}}, uid="a")
    tools, messages = await toolbox.open(task)
    assert messages == []
    program = await tools.respond(say("Let me see.\n```python\nx = 617\nprint(2 * x)\n```"))
    tools, _ = await toolbox.open(task, tools.state())
    answer = await tools.respond(say("It is 1234."))
    assert program.text.startswith("```output\n1234\n```")
    assert (program.done, program.reward) == (False, None)
    assert (answer.done, answer.reward) == (True, 1.0)
    assert answer.metrics["programs"] == 1

"""A reward function is called with what its signature names."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.rewards.signatures import ARGUMENTS, BATCH_ARGUMENTS, adapt_function, takes_lists

pytestmark = pytest.mark.unit

ROW = {
    "data_source": "mine",
    "solution_str": "it is 4",
    "ground_truth": None,
    "extra_info": {"answer": "4", "prompt": "2+2?", "level": 3},
}
CHAT = [{"role": "user", "content": "3+3?"}]
BATCH = {
    "data_sources": ["mine", "mine"],
    "solution_strs": ["it is 4", "6"],
    "ground_truths": ["4", "6"],
    "extra_infos": [{"answer": "4", "prompt": "2+2?"}, {"answer": "6", "prompt": CHAT}],
}


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    return (data_source, solution_str, ground_truth, extra_info["level"])


def by_name(response: str, answer: str, prompt: str = "", bonus: float = 0.0) -> Any:
    return (response, answer, prompt, bonus)


def everything(completion: str, **row: Any) -> Any:
    return (completion, row["answer"], row["level"], row["data_source"])


def trl(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> Any:
    return list(zip(prompts, completions, answer, columns["ground_truth"], strict=True))


def of_the_last_turn(final_response: str, answer: str) -> Any:
    return (final_response, answer)


class Judge:
    def __call__(self, *, response: str, level: int) -> Any:
        return (response, level)


@pytest.mark.parametrize(
    ("function", "kwargs", "result"),
    [
        (verl, {}, ("mine", "it is 4", None, 3)),
        (by_name, {}, ("it is 4", "4", "2+2?", 0.0)),
        (by_name, {"bonus": 0.5}, ("it is 4", "4", "2+2?", 0.5)),
        (functools.partial(by_name, bonus=1.0), {}, ("it is 4", "4", "2+2?", 1.0)),
        (of_the_last_turn, {}, ("it is 4", "4")),
        (everything, {}, ("it is 4", "4", 3, "mine")),
        (Judge(), {}, ("it is 4", 3)),
        (trl, {}, ("2+2?", "it is 4", "4", None)),
    ],
)
def test_a_row_is_scored_in_every_form(function: Callable[..., Any], kwargs: dict[str, Any], result: Any) -> None:
    assert adapt_function(function, ARGUMENTS, kwargs)(**ROW, **kwargs) == result


def test_trls_form_gets_the_whole_batch_with_messages_where_the_prompt_is_a_chat() -> None:
    first, second = adapt_function(trl, BATCH_ARGUMENTS, {})(**BATCH)
    assert first == ("2+2?", "it is 4", "4", "4")
    assert second == (CHAT, [{"role": "assistant", "content": "6"}], "6", "6")


def test_an_async_function_of_lists_is_awaited() -> None:
    async def judge(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert asyncio.run(adapt_function(judge, ARGUMENTS, {})(**ROW)) == 7.0


@pytest.mark.parametrize("returned", [1.0, {"score": 1.0}, "1", None, [1.0, 2.0]])
def test_a_function_of_lists_must_return_a_score_for_each_response(returned: Any) -> None:
    def judge(completions: list[str], **columns: Any) -> Any:
        return returned

    count = "2 scores" if isinstance(returned, list) else f"a {type(returned).__name__}"
    with pytest.raises(ValueError, match=rf"judge returned {count} for 1 responses; return "):
        adapt_function(judge, ARGUMENTS, {})(**ROW)


def test_a_column_that_the_row_lacks_is_named_with_those_it_has() -> None:
    def score(response: str, solution: str) -> float:
        return 0.0

    with pytest.raises(TypeError, match=r"asks for solution; the row has answer, level, prompt"):
        adapt_function(score, ARGUMENTS, {})(**ROW)


@pytest.mark.parametrize("arguments", [ARGUMENTS, BATCH_ARGUMENTS])
def test_a_column_that_no_row_has_is_refused_before_a_call(arguments: tuple[str, ...]) -> None:
    def lists(completions: list[str], anwser: list[str], **columns: object) -> list[float]:
        return [0.0 for _ in completions]

    def one(response: str, ground_truth: str, anwser: str) -> float:
        return 0.0

    function = one if arguments is ARGUMENTS else lists
    with pytest.raises(TypeError, match=r"asks for anwser; the row has answer, prompt. Did you mean answer\?"):
        adapt_function(function, arguments, {}, ("prompt", "answer"))
    adapt_function(function, arguments, {}, ("prompt", "anwser"))
    adapt_function(function, arguments, {"anwser": "1"}, ("prompt",))


@pytest.mark.parametrize("arguments", [ARGUMENTS, BATCH_ARGUMENTS])
def test_a_function_that_takes_no_response_is_refused_at_once(arguments: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"A reward function takes \(data_source"):
        adapt_function(lambda text: 0.0, arguments, {})


def test_which_functions_take_lists() -> None:
    assert takes_lists(["prompts", "completions"])
    assert takes_lists(BATCH_ARGUMENTS)
    assert not takes_lists(ARGUMENTS)

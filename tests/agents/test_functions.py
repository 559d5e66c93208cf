"""`@tool`: schemas from hints and docstrings, arguments checked, exceptions as observations."""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from dovetail.agents import InfrastructureError, Task, ToolResult, tool
from dovetail.agents.tools.functions import FunctionToolbox, is_tool
from dovetail.agents.tools.schema import ToolError, read_docstring, read_signature
from dovetail.agents.types import ToolCall

pytestmark = pytest.mark.unit


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


@dataclass
class Point:
    x: int
    y: int


@tool
def weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS, kind: Literal["short", "long"] | None = None) -> str:
    """Forecast the weather.

    Takes what the stations say.

    Args:
        city: Name of the city,
            in English.
        days (int): How many days.
        unit: Of temperatures.

    Returns:
        The forecast.
    """
    return f"{city} {days} {unit.name} {kind}"


def run(function: Callable[..., Any], arguments: dict[str, Any] | None, *, name: str | None = None) -> ToolResult:
    async def call() -> ToolResult:
        toolbox = FunctionToolbox([function])
        tools, messages = await toolbox.open(Task([]))
        assert messages == []
        return await tools.call(ToolCall(name or tools.schemas[0]["function"]["name"], arguments, error="no brace"))

    return asyncio.run(call())


def test_the_schema_is_what_hints_and_docstring_say() -> None:
    assert is_tool(weather)
    assert not is_tool(run)
    assert read_signature(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast the weather.\nTakes what the stations say.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "default": 1, "description": "How many days."},
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "kelvin"],
                        "default": "celsius",
                        "description": "Of temperatures.",
                    },
                    "kind": {"type": "string", "enum": ["short", "long"], "nullable": True},
                },
                "required": ["city"],
            },
        },
    }


def test_lists_dicts_and_dataclasses_are_written_out() -> None:
    @tool(name="draw", description="Draws.")
    def function(points: list[Point], names: dict[str, float], title: str, model_config: bool) -> Any:
        return [points, names, title, model_config]

    signature = read_signature(function, name="draw", description="Draws.")
    properties = signature.schema["function"]["parameters"]["properties"]
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
    }
    assert properties["points"] == {"type": "array", "items": point}
    assert properties["names"] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert properties["title"] == {"type": "string"}
    arguments = {"points": [{"x": 1, "y": 2}], "names": {"a": 1}, "title": "t", "model_config": True}
    assert signature.bind(arguments)["points"] == [Point(1, 2)]


def test_a_call_gets_converted_arguments_and_the_functions_own_defaults() -> None:
    assert run(weather, {"city": "Oslo", "days": "3", "unit": "kelvin"}).text == "Oslo 3 KELVIN None"
    assert weather("Rome") == "Rome 1 CELSIUS None"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"days": 2}, "the argument 'city' is missing"),
        ({"city": "Oslo", "town": 1}, "there is no argument 'town'; the arguments are city, days, unit, kind"),
        ({"city": "Oslo", "days": "soon"}, "argument 'days': input should be a valid integer"),
        ({"city": "Oslo", "unit": "newton"}, "'celsius' or 'kelvin'"),
        ({"city": 3}, "argument 'city': input should be a valid string, got 3"),
        (None, "Error: the call could not be read: no brace."),
    ],
)
def test_arguments_that_do_not_fit_are_an_observation(arguments: dict[str, Any] | None, says: str) -> None:
    text = run(weather, arguments).text
    assert text.startswith("Error: ")
    assert says in text


def test_an_unknown_tool_is_an_observation_that_names_the_tools() -> None:
    assert run(weather, {}, name="clock").text == "Error: there is no tool 'clock'; the tools are weather."


def test_a_tool_that_raises_or_exits_is_an_observation() -> None:
    @tool
    def divide(a: float, b: float) -> float:
        """Divide."""
        return a / b

    @tool
    async def leave() -> None:
        """Leave."""
        sys.exit(3)

    @tool
    def stop() -> None:
        """Stop."""
        raise StopIteration

    assert run(divide, {"a": 1, "b": 0}).text == "Error: divide failed: ZeroDivisionError: float division by zero"
    assert run(leave, {}).text == "Error: leave failed: SystemExit: 3"
    assert "StopIteration" in run(stop, {}).text
    assert run(divide, {"a": 1, "b": 4}).text == "0.25"


def test_infrastructure_errors_pass() -> None:
    @tool
    def fetch() -> None:
        """Fetch."""
        raise InfrastructureError("no server")

    with pytest.raises(InfrastructureError, match="no server"):
        run(fetch, {})


def test_sync_functions_run_in_a_thread_and_async_ones_in_the_loop() -> None:
    @tool
    def blocking() -> bool:
        """Block."""
        return threading.current_thread() is threading.main_thread()

    @tool
    async def waiting() -> bool:
        """Wait."""
        return threading.current_thread() is threading.main_thread()

    assert run(blocking, {}).text == "false"
    assert run(waiting, {}).text == "true"


async def test_a_deadline_gives_up_a_call_that_hangs_and_others_go_on() -> None:
    release = threading.Event()

    @tool
    def hang(seconds: int) -> str:
        """Hang."""
        if seconds:
            release.wait()
        return "back"

    tools, _ = await FunctionToolbox([hang]).open(Task([]))
    slow = [
        asyncio.wait_for(tools.call(ToolCall("hang", {"seconds": 9})), timeout=0.01) for _ in range(40)
    ]  # more than a pool would have
    errors = await asyncio.gather(*slow, return_exceptions=True)
    last = await tools.call(ToolCall("hang", {"seconds": 0}))
    release.set()
    assert all(isinstance(error, TimeoutError) for error in errors)
    assert last.text == "back"


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    """Do."""


def no_doc(x: int) -> None: ...


def star(*x: int) -> None:
    """Do."""


def typo(x: int) -> None:
    """Do.

    Args:
        y: A number.
    """


def opaque(x: threading.Thread) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_hint, "The parameter x of no_hint has no type hint; write `x: str`"),
        (no_doc, "no_doc has no docstring"),
        (star, "takes \\*x: .*name each of them"),
        (typo, "describes y, which it does not take"),
        (opaque, "(?s)type hints of opaque .* Use str, int, float"),
    ],
)
def test_a_function_that_cannot_be_shown_is_named_with_the_fix(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="Two tools are called weather"):
        FunctionToolbox([weather, weather])


def test_a_docstring_without_sections_is_all_description() -> None:
    assert read_docstring("One.\nTwo: still one.\n\nThree.") == ("One. Two: still one.\nThree.", {})

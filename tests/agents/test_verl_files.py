"""verl's files as they are: tools by YAML, `@function_tool`, interactions, and the names they import."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.agents import Task
from dovetail.agents.tools.load import load_functions, load_interactions, load_tool_file, load_toolbox
from dovetail.agents.tools.schema import ToolError
from dovetail.agents.types import Toolbox, ToolCall, ToolResult
from dovetail.agents.verl.adapters import VerlToolbox
from dovetail.agents.verl.alias import NAMES, alias_verl
from dovetail.data.build import load_tools
from dovetail.data.errors import DataError

pytestmark = pytest.mark.unit

TOOL = '''
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op


class Checker(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.open = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self.open[instance_id] = {"truth": truth, "asked": 0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        state = self.open[instance_id]
        state["asked"] += 1
        if parameters["answer"] == "crash":
            raise KeyError("crash")
        score = gsm8k.compute_score("#### " + parameters["answer"], state["truth"], method="flexible")
        who = kwargs["agent_data"].request_id
        text = f"{score} {state['asked']} {who} {self.config['level']}"
        return ToolResponse(text=text), -0.05, {"asked": 1, "x": "y"}

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.open[instance_id]


class Plain:
    """One that inherits from nothing, with its own schema."""

    def __init__(self, config, tool_schema):
        self.tool_schema = {"type": "function", "function": {"name": "plain", "description": "", "parameters": {}}}

    def create(self):
        return "id"

    def execute(self, instance_id, parameters):
        return {"got": parameters}, None, None

    def release(self, instance_id):
        pass
'''
YAML = """
tools:
  - class_name: "{file}:Checker"
    config: {{type: native, level: 3}}
    tool_schema:
      type: function
      function:
        name: check
        description: Check an answer.
        parameters:
          type: object
          properties: {{answer: {{type: string, description: The answer., minLength: 1}}}}
          required: [answer]
  - class_name: "{file}:Plain"
    config: {{type: native}}
  - class_name: calculator
"""
ROW = {"extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "7"}}}}}


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture(autouse=True)
def _without_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "verl" or name.startswith("dovetail_user_"):
            del sys.modules[name]


@pytest.fixture
def tool_yaml(tmp_path: Path) -> str:
    return write(tmp_path, "tools.yaml", YAML.format(file=write(tmp_path, "my_tools.py", TOOL)))


def play(toolbox: Toolbox, task: Task, *calls: ToolCall) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        tools, _ = await toolbox.open(task)
        results = [await tools.call(call) for call in calls]
        await tools.close()
        assert await tools.reward() is None
        return results

    return asyncio.run(run())


def test_a_tool_of_verl_keeps_one_instance_for_its_trajectory(tool_yaml: str) -> None:
    toolbox = load_toolbox(tool_config_path=tool_yaml)
    assert toolbox is not None
    call = ToolCall("check", {"answer": "7"})
    for uid in ("a", "b"):
        first, second, plain, sum_ = play(
            toolbox, Task([], ROW, uid=uid), call, call, ToolCall("plain", {"z": 1}),
            ToolCall("calculator", {"expression": "2 * 3"}),
        )  # fmt: skip
        assert (first.text, second.text) == (f"1.0 1 {uid}-0 3", f"1.0 2 {uid}-0 3")
        assert first.reward is None
        assert first.metrics == {"asked": 1.0, "tool_reward/check": -0.05}
        assert plain.text == '{"got": {"z": 1}}'
        assert sum_.text == "6"


def test_calls_that_run_at_once_share_the_instance_and_it_is_released() -> None:
    class Counted:
        tool_schema: ClassVar = {"type": "function", "function": {"name": "count", "description": "", "parameters": {}}}
        created: ClassVar[list[int]] = []

        async def create(self) -> int:
            await asyncio.sleep(0)
            self.created.append(len(self.created))
            return self.created[-1]

        async def execute(self, instance: int, parameters: dict[str, Any]) -> str:
            return str(instance)

        async def release(self, instance: int) -> None:
            self.created.remove(instance)

    async def run() -> list[str]:
        tools, _ = await VerlToolbox([Counted()]).open(Task([]))
        results = await asyncio.gather(*(tools.call(ToolCall("count", {})) for _ in range(3)))
        await tools.close()
        return [result.text for result in results]

    assert asyncio.run(run()) == ["0"] * 3
    assert Counted.created == []


def test_a_release_that_raises_keeps_no_other_tool_from_its_own() -> None:
    released: list[str] = []

    class Tool:
        def __init__(self, name: str) -> None:
            self.tool_schema = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}

        async def create(self) -> str:
            return self.tool_schema["function"]["name"]

        async def execute(self, instance: str, parameters: dict[str, Any]) -> str:
            return instance

        async def release(self, instance: str) -> None:
            released.append(instance)
            raise ConnectionError(instance)

    async def run() -> None:
        tools, _ = await VerlToolbox([Tool("a"), Tool("b")]).open(Task([]))
        assert [(await tools.call(ToolCall(name, {}))).text for name in ("a", "b")] == ["a", "b"]
        with pytest.raises(ConnectionError):
            await tools.close()

    asyncio.run(run())
    assert sorted(released) == ["a", "b"]


def test_an_exception_of_a_tool_is_an_observation(tool_yaml: str) -> None:
    toolbox = load_tool_file(tool_yaml)[0]
    crash, unknown = play(toolbox, Task([], ROW), ToolCall("check", {"answer": "crash"}), ToolCall("chekc", {}))
    assert crash.text == "Error: check failed: KeyError: 'crash'"
    assert "the tools are check" in unknown.text


async def test_schemas_are_those_of_the_file_and_the_prompt_shows_the_same(tool_yaml: str) -> None:
    toolbox = load_toolbox(tool_config_path=tool_yaml)
    assert toolbox is not None
    check, plain, calculator = (await toolbox.open(Task([], ROW)))[0].schemas
    assert [check] == load_tools(tool_yaml)
    assert check["function"]["parameters"]["properties"]["answer"]["minLength"] == 1
    assert (plain["function"]["name"], calculator["function"]["name"]) == ("plain", "calculator")


@pytest.mark.parametrize("selected", [["check"], ["calculator", "plain"], []])
def test_tool_selection_of_a_row_chooses_among_all_tools(tool_yaml: str, selected: list[str]) -> None:
    toolbox = load_toolbox(tool_config_path=tool_yaml)
    assert toolbox is not None
    task = Task([], ROW | {"tool_selection": selected})
    tools, _ = asyncio.run(toolbox.open(task))
    assert sorted(schema["function"]["name"] for schema in tools.schemas) == selected
    other = next(name for name in ("check", "calculator") if name not in selected)
    (result,) = play(toolbox, task, ToolCall(other, {}))
    assert f"there is no tool '{other}'" in result.text
    with pytest.raises(ToolError, match=r"tool_selection names \['look'\]; the tools are \['calculator', 'check', 'pl"):
        play(toolbox, Task([], {"extra_info": {"tool_selection": ["look"]}}))


def test_tool_selection_chooses_among_functions(tmp_path: Path) -> None:
    file = write(
        tmp_path, "mine.py", "from dovetail.agents import tool\n@tool\ndef one() -> int:\n    'One.'\n    return 1\n"
    )
    toolbox = load_toolbox(function_tool_path=file)
    assert toolbox is not None
    (result,) = play(toolbox, Task([]), ToolCall("one", {}))
    assert result.text == "1"
    (result,) = play(toolbox, Task([], {"tool_selection": []}), ToolCall("one", {}))
    assert "the tools are none" in result.text


def test_function_tools_of_both_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(
        tmp_path,
        "functions.py",
        """
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse
from dovetail.agents import tool

@function_tool
def add(a: int, b: int = 1) -> tuple:
    \"\"\"Add.

    Args:
        a: One number.
        b: Another.
    \"\"\"
    return {"sum": a + b}, 0.5, {"calls": 1}

@function_tool("say")
async def _say(text: str) -> str:
    \"\"\"Say.

    Args:
        text: What.
    \"\"\"
    return ToolResponse(text=text, image=["pixels"])

@function_tool("raw", schema={"type": "function", "function": {"name": "raw", "description": "", "parameters": {}}})
def _raw(**anything):
    return sorted(anything)

@tool
def pair() -> tuple:
    \"\"\"A pair.\"\"\"
    return 1, 2

same = pair
""",
    )
    add, said, raw, pair, wrong = play(
        load_functions(path),
        Task([]),
        ToolCall("add", {"a": 2}),
        ToolCall("say", {"text": "hi"}),
        ToolCall("raw", {"z": 1, "y": 2}),
        ToolCall("pair", {}),
        ToolCall("add", {"a": "two"}),
    )
    assert add == ToolResult('{"sum": 3}', metrics={"calls": 1.0, "tool_reward/add": 0.5})
    assert said == ToolResult(
        "hi\nError: the image that say returned cannot be shown; only text can.", failure="not shown"
    )
    assert caplog.text.count("the model gets an error for the image that the tool say returned") == 1
    assert (raw.text, pair.text) == ('["y", "z"]', "[1, 2]")
    assert "argument 'a'" in wrong.text


INTERACTION = """
from verl.interactions.base import BaseInteraction


class PatientInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.truth, self.ended = {}, []

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truth[instance_id]
        return right, "Well done." if right else f"{self.name}: again.", float(right), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.truth[instance_id]
"""


async def test_an_interaction_is_a_simulated_user(tmp_path: Path) -> None:
    file = write(tmp_path, "users.py", INTERACTION)
    entries = f'interaction:\n  - {{class_name: "{file}:PatientInteraction", config: {{}}}}\n'
    entries += f'  - {{name: other, class_name: "{file}:PatientInteraction"}}\n'
    toolbox = load_interactions(write(tmp_path, "users.yaml", entries))

    task = Task([], {"extra_info": {"interaction_kwargs": {"name": "patient", "ground_truth": "7"}}}, uid="u")
    user: Any
    user, messages = await toolbox.open(task)
    assert messages == []
    say = lambda text: user.respond([{"role": "assistant", "content": text}])  # noqa: E731
    assert await say("6") == ToolResult("patient: again.", metrics={"turn_score": 0.0})
    assert await say("7") == ToolResult("Well done.", done=True, metrics={"turn_score": 1.0})
    await user.close()
    with pytest.raises(ToolError, match="name=None; the interactions are patient, other"):
        await toolbox.open(Task([]))


def test_verls_own_examples_for_gsm8k(tmp_path: Path) -> None:
    schema = "{type: function, function: {name: calc_gsm8k_reward, description: Check.}}"
    entry = f"class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {{type: native}}, tool_schema: {schema}"
    toolbox = load_toolbox(tool_config_path=write(tmp_path, "tools.yaml", f"tools: [{{{entry}}}]"))
    assert toolbox is not None
    row = {"extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}}
    calls = [ToolCall("calc_gsm8k_reward", {"answer": answer}) for answer in ("70", "72", "#### 72")]
    results = play(toolbox, Task([], row), *calls)
    assert [result.metrics["tool_reward/calc_gsm8k_reward"] for result in results] == [-0.05, 0.0, -0.05]

    text = "interaction: [{name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}]"
    users = load_interactions(write(tmp_path, "users.yaml", text))

    async def talk() -> list[bool]:
        user: Any
        user, _ = await users.open(
            Task([], {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"}}})
        )
        said = [[{"role": "assistant", "content": text}] for text in ("70", "It is 72.", "so\n#### 72")]
        done = [(await user.respond(messages)).done for messages in said]
        await user.close()
        return done

    assert asyncio.run(talk()) == [False, True, True]


def test_every_name_of_the_alias_can_be_imported_and_others_say_what_there_is() -> None:
    alias_verl()
    alias_verl()
    for path, names in NAMES.items():
        module = importlib.import_module(path)
        for name in names:
            assert getattr(module, name) is names[name]
    with pytest.raises(
        ImportError, match=r"dovetail stands in for it with BaseInteraction in verl\.interactions\.base"
    ):
        from verl.interactions.base import Gsm8kInteraction  # noqa: F401
    with pytest.raises(ImportError, match=r"AgentLoopManager is not here.*with AgentLoopBase, AgentLoopMetrics, "):
        from verl.experimental.agent_loop.agent_loop import AgentLoopManager  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"verl\.trainer"):
        importlib.import_module("verl.trainer.main_ppo")


def test_an_installed_verl_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl").mkdir()
    write(tmp_path / "verl", "__init__.py", "here = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    alias_verl()
    assert importlib.import_module("verl").here


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("tools: [1]", DataError, "1 is no tool"),
        ("- {type: function, function: {name: f}}", ToolError, "a schema but no class_name"),
        ("tools: [{class_name: json.JSONEncoders}]", ValueError, "Did you mean JSONEncoder"),
        ("tools: [{class_name: x, config: {type: mcp}}]", ToolError, "needs mcp.mcp_servers_config_path"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_tool_file(write(tmp_path, "tools.yaml", text))


def test_a_list_of_schemas_is_shown_in_prompts(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    assert load_tools(write(tmp_path, "tools.yaml", "- {type: function, function: {name: f}}")) == [schema]
    with pytest.raises(DataError, match="there is no such file"):
        load_tools(str(tmp_path / "none.yaml"))


def test_an_environment_is_named_by_file_or_module(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine.py",
        """
from dovetail.agents import Environment, Step

class Talk(Environment):
    def step(self, action):
        return Step(action)

class Box:
    def look(self) -> str:
        \"\"\"Look.\"\"\"
        return "in"
""",
    )
    for name, responds in (("Talk", True), ("Box", False)):
        toolbox = load_toolbox(environment=f"{path}:{name}")
        assert toolbox is not None
        tools, _ = asyncio.run(toolbox.open(Task([])))
        assert hasattr(tools, "respond") == responds
    assert load_toolbox() is None

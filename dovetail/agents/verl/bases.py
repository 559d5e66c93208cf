"""The classes and decorators that users' files for verl import: the contracts, and nothing behind them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.agents.tools.functions import tool
from dovetail.agents.tools.schema import Signature

FUNCTION_TOOL = "__verl_function_tool__"


class _Schema(BaseModel):
    """Keeps what it does not name: a file may have any JSON schema."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Schema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool gives back. Only `text` reaches the model here."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """A tool with a lifetime: `create`, any number of `execute`, `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            name = type(self).__name__
            raise ValueError(f"{name} has no schema; give `tool_schema` in the YAML, or write get_openai_tool_schema.")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


class BaseInteraction:
    """A simulated user."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no generate_response.")

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        return None


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """`@function_tool`, `@function_tool("name")`: `@tool`, with verl's return values."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        given = schema.model_dump(exclude_none=True) if isinstance(schema, BaseModel) else schema
        if given is None:
            tool(name=None if callable(name) else name)(function)
            signature = function.__dict__["__dovetail_tool__"]
        else:
            signature = Signature(given, None)
        setattr(function, FUNCTION_TOOL, signature)
        return function

    return mark(name) if callable(name) else mark


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Every call is an event of its trajectory already."""
    return function

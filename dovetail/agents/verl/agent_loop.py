"""What a file with an agent loop for verl imports: the base class, its output, and what loops use beside them.

The names of verl at its commit 1dda039b, and `apply_chat_template` and `init_class` of the versions before it. How a
loop is run, and what becomes of its output, is in `run_loop`. Text only: images are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.agents.chat import ChatRenderer
from dovetail.agents.parsers import turn_parser
from dovetail.agents.types import Message

NO_IMAGES = "agents read text only here: images, videos and sounds are not shown to the model"


class AgentLoopMetrics(BaseModel):
    """Seconds, and whatever else a loop measures."""

    model_config = ConfigDict(extra="allow")

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """One row. Log-probs and versions are the engine's: `response_logprobs` is not read."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenOutput(BaseModel):
    """What `server_manager.generate` gives."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class LLMServerClient:
    """What `server_manager` is, for annotations."""


@dataclass(frozen=True)
class DictConfigWrap:
    """How a configuration is handed to a loop."""

    config: Any


@dataclass(frozen=True)
class ToolListWrap:
    """How the run's tools are handed to a loop."""

    tools: list[Any]


@dataclass(frozen=True)
class MergeResult:
    """Ids of a conversation with what was appended to it."""

    token_ids: list[int]
    appended_token_count: int
    kind: str
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class AgentLoopBase(ABC):
    """A loop that puts token ids together itself. Made for each trajectory."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.prompt_length: int = self.rollout_config.prompt_length
        self.response_length: int = self.rollout_config.response_length
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.loop = asyncio.get_running_loop()
        self._renderer: ChatRenderer = server_manager.renderer

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """The row of a trajectory; `kwargs` are the columns of its task."""

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_processor_kwargs: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Ids of the messages and of the generation prompt, the last `prompt_length` of them."""
        refuse_media(images, videos, audios)
        ids = list(self._renderer.start(list(messages), list(tools or ()) or None))
        if remove_system_prompt:
            ids = ids[len(self.system_prompt) :]
        return ids[-self.prompt_length :]

    @property
    def system_prompt(self) -> list[int]:
        """The ids that the template writes before the first message, whatever it is."""
        once, twice = (
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}] * count, tokenize=False, **self.apply_chat_template_kwargs
            )
            for count in (1, 2)
        )
        leading = once[: len(once) - (len(twice) - len(once))]
        if leading + 2 * once[len(leading) :] != twice:
            raise ValueError(
                "remove_system_prompt=True: the chat template writes a message differently where another one precedes "
                "it, so a message has no ids of its own; use ct_merge_non_assistant_msg."
            )
        return list(self.tokenizer.encode(leading, add_special_tokens=False)) if leading else []

    async def process_multi_modal_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Nothing: a message with an image is refused."""
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        refuse_media([part for content in contents for part in content if part.get("type") != "text"])
        return {}

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        refuse_media([True] * has_multi_modal)

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}  # loops that began as a copy of verl's own ask

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        return await self.process_multi_modal_info(messages)

    async def ct_build_initial_tokens(self, messages: Sequence[Message], *more: Any, **named: Any) -> list[int]:
        return await self.apply_chat_template(messages, *more, **named)

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Sequence[Message],
        updated_messages: Sequence[Message],
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append what follows the model's last answer, up to the next generation prompt; masked."""
        previous, new = list(previous_messages), list(updated_messages[len(previous_messages) :])
        if not previous or previous[-1].get("role") != "assistant":
            raise ValueError("ct_merge_non_assistant_msg: previous_messages must end with the model's answer.")
        last = runtime_token_ids[-1]
        closed = last in self._renderer.stop_token_ids
        ids = self._renderer.extend(
            previous, new, closed=closed, tools=list(tools or ()) or None, stop_id=last if closed else None
        )
        if ids is None:
            roles = ", ".join(str(message.get("role")) for message in new)
            raise ValueError(
                f"the chat template rewrites history where {roles} follows the model's answer, so nothing can be "
                "appended; use another template in actor_rollout_ref.model.custom_chat_template."
            )
        return _merged(runtime_token_ids, ids, response_mask, response_logprobs, [0.0] * len(ids), kind="non_assistant")

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append what the model wrote."""
        return _merged(
            runtime_token_ids,
            assistant_token_ids,
            response_mask,
            response_logprobs,
            assistant_logprobs or (),
            trained=1,
        )


def _merged(
    before: Sequence[int],
    ids: Sequence[int],
    mask: Sequence[int],
    log_probs: Sequence[float] | None,
    new_log_probs: Sequence[float],
    *,
    trained: int = 0,
    kind: str = "assistant",
) -> tuple[MergeResult, list[int], list[float] | None]:
    merged = MergeResult([*before, *ids], len(ids), kind)
    return merged, [*mask, *[trained] * len(ids)], None if log_probs is None else [*log_probs, *new_log_probs]


def refuse_media(*media: Any) -> None:
    """ValueError unless all of them are empty."""
    if any(one is not None and len(one) for one in media):
        raise ValueError(f"{NO_IMAGES}; train without agents on prompts with images, or leave them out.")


class FunctionCall(BaseModel):
    """A call as loops get it: its arguments are JSON."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser:
    """`multi_turn.format`'s parser. Calls that cannot be read are left out."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids: list[int] = []  # the run's stop tokens end a call already
        self._parse = turn_parser(name, tokenizer)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        return cls(name, tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        schemas = [tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True) for tool in tools or ()]
        said, calls = self._parse(responses_ids, schemas)
        return said, [
            FunctionCall(name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            for call in calls
            if call.arguments is not None
        ]


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds that the block takes."""
    began = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


def register(agent_name: str) -> Callable[[type], type]:
    """Register a subclass of `AgentLoopBase` under a name for `agent_name`."""
    from dovetail.agents.loops import agent_loop  # which imports the alias, and so this

    return agent_loop(agent_name)

"""OpenAI's chat completions: requests to what a session takes, turns to completions. Knows no HTTP."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.agents.types import Message, Turn

MODEL = "policy"
# What the rows of a batch have in common is the run's to say: the trainer computes log-probs with one temperature.
_REFUSED = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "logit_bias": "tokens are sampled as the run says",
    "logprobs": "log-probs are recorded for training, and not sent",
    "top_logprobs": "log-probs are recorded for training, and not sent",
    "audio": "text only",
    "modalities": "text only",
    "prediction": "not supported",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRequestError(ValueError):
    """A request that cannot be served as it is. `param` is the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What was asked for. Temperature, top_p, seed and penalties are read by nobody: the run's hold."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    takes_calls: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool
    model: str
    key: str
    """Equal for equal requests, however their JSON is ordered."""


def read_request(body: Any) -> ChatRequest:
    """The request, or `BadRequestError` that names the field. What has another shape raises as Python does."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body must be a JSON object")
    for name, why in _REFUSED.items():
        if body.get(name) not in (None, False, {}, [], 0):
            raise BadRequestError(f"{name} is not supported here: {why}.", name)
    if body.get("n") not in (None, 1):
        raise BadRequestError(f"n={body['n']!r} is not supported: a call is one turn of the trajectory; use n=1.", "n")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise BadRequestError("only response_format={'type': 'text'} is supported.", "response_format")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadRequestError(f"tool_choice={choice!r} is not supported; use 'auto' or 'none'.", "tool_choice")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadRequestError(f"max_tokens={limit!r} must be a positive number.", "max_tokens")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise BadRequestError(f"stop={list(stop)!r} must be texts of at least one character.", "stop")
    tools = list(body.get("tools") or ())
    if wrong := [tool for tool in tools if not tool["function"]["name"]]:
        raise BadRequestError(f"a tool has no name: {wrong[0]!r}.", "tools")
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=tools,
        takes_calls=choice == "auto",
        max_tokens=limit,
        stop=stop,
        stream=bool(body.get("stream")),
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        model=str(body.get("model") or MODEL),
        key=hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest(),
    )


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise BadRequestError("messages must be a list of at least one message.", "messages")
    for message in given:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise BadRequestError(f"a message has one of the roles {', '.join(_ROLES)}: {message!r}.", "messages")
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise BadRequestError("only parts of type text are supported.", "messages")
        if any(not call["function"]["name"] for call in message.get("tool_calls") or ()):
            raise BadRequestError(f"a call has no name: {message!r}.", "messages")
    return [_plain(message) for message in given]


def _plain(message: Mapping[str, Any]) -> Message:
    """Text in one piece, and the role that chat templates have."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content or ""}


def completion_id(session: str, turn: Turn) -> str:
    return f"chatcmpl-{session}-{turn.node}"


def completion(turn: Turn, request: ChatRequest, session: str) -> dict[str, Any]:
    """The turn as a completion. Its id names the turn, so a retry gets the same."""
    content, calls = turn.message["content"], list(turn.message.get("tool_calls") or ())
    if calls and not request.takes_calls:
        content, calls = content + "".join(call.text for call in turn.calls if call.arguments is not None), []
    reason = "tool_calls" if calls else "length" if turn.finish_reason == "length" else "stop"
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [_sent(call) for call in calls]
    return {
        "id": completion_id(session, turn),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": turn.num_prompt_tokens,
            "completion_tokens": len(turn.token_ids),
            "total_tokens": turn.num_prompt_tokens + len(turn.token_ids),
        },
        "dovetail": {"node": turn.node},
    }


def _sent(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def chunks(whole: Mapping[str, Any], *, usage: bool) -> Iterator[str]:
    """The completion as server-sent events. It is complete before the first one: what was said comes in one piece."""
    choice = whole["choices"][0]
    message = dict(choice["message"])
    calls = message.pop("tool_calls", None)
    deltas: list[tuple[dict[str, Any], str | None]] = [(message, None)]
    deltas += [({"tool_calls": [{"index": i, **call}]}, None) for i, call in enumerate(calls or ())]
    deltas.append(({}, choice["finish_reason"]))
    frame = {**whole, "object": "chat.completion.chunk"}
    used = frame.pop("usage")
    for delta, reason in deltas:
        yield _event({**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]})
    if usage:
        yield _event({**frame, "choices": [], "usage": used})
    yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """For Anthropic's clients, too: they want the outer `type`."""
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}

"""Anthropic's messages: a request as one of OpenAI's, a completion as a message. Knows no HTTP and no session."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.agents.endpoint.openai import BadRequestError
from dovetail.agents.types import Message

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def chat_body(body: Any) -> dict[str, Any]:
    """The body of `/v1/messages` as one of `/v1/chat/completions`; `BadRequestError` says what is wrong."""
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
        raise BadRequestError("messages must be a list of at least one message.", "messages")
    if (body.get("thinking") or {}).get("type", "disabled") != "disabled":
        raise BadRequestError("thinking is not supported here: what the model thinks is part of its text.", "thinking")
    system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    return {
        "messages": system + [part for message in body["messages"] for part in _messages(message)],
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "tool_choice": choice,
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "stream": body.get("stream"),
        "model": body.get("model"),
    }


def _messages(message: Any) -> list[Message]:
    """A user's message with results of tools is several of OpenAI's."""
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if role not in ("user", "assistant") or not isinstance(content, (str, list)):
        raise BadRequestError(f"a message has the role user or assistant, and content: {message!r}.", "messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    allowed = ("text", "tool_use") if role == "assistant" else ("text", "tool_result")
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") not in allowed:
            raise BadRequestError(f"content of the {role} is of type {' or '.join(allowed)}: {block!r}.", "messages")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    if role == "assistant":
        calls = [
            {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content") or "")}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    return results + ([{"role": role, "content": text}] if text or not results else [])


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise BadRequestError(f"a tool needs an input_schema; the server has no tools of its own: {tool!r}.", "tools")
    described = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**described, "parameters": tool["input_schema"]}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(block.get("type") != "text" for block in content):
        raise BadRequestError("only blocks of type text are supported.", "messages")
    return "".join(block["text"] for block in content)


def message_of(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A completion as a message."""
    choice, usage = whole["choices"][0], whole["usage"]
    said = choice["message"]
    content: list[dict[str, Any]] = [{"type": "text", "text": said["content"]}] if said["content"] else []
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in said.get("tool_calls") or ()
    ]
    return {
        "id": whole["id"],
        "type": "message",
        "role": "assistant",
        "model": whole["model"],
        "content": content,
        "stop_reason": _STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def message_events(message: Mapping[str, Any]) -> Iterator[str]:
    """The message as server-sent events; each block comes in one piece."""
    begun = {**message, "content": [], "stop_reason": None}
    yield _event({"type": "message_start", "message": begun})
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": ended, "usage": message["usage"]})
    yield _event({"type": "message_stop"})


def _event(value: Mapping[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n"

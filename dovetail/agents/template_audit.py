"""Conversations that a chat template is asked about, and what is found out about it. Renders nothing: `chat` does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dovetail.agents.types import Message

Property = Literal["prefix", "generation_prompt", "independence", "closing", "boundary", "accepted"]
MEANING: dict[Property, str] = {
    "prefix": "what is already written stays as it is when a message is added",
    "generation_prompt": "what stands before an answer is the same while it is asked for and in the history",
    "independence": "the history shows the answer as it was sampled, its thinking and its calls included",
    "closing": "a special token ends an answer, the one that the model writes itself",
    "boundary": "that token is one id, so text before it and text after it are encoded apart",
    "accepted": "the template takes this kind of conversation",
}
PROBES = ("zebra", "quartz")
_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": _PARAMETERS}}
RESPONSE_CASE, RESULT_CASE = "a user's message after an answer", "a result after a call"
"""Names of cases without which neither an environment nor a tool is of use."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Why a conversation cannot be continued by appending."""

    property: Property
    example: str


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One kind of conversation, and what keeps it from being append-only (None: nothing does)."""

    name: str
    rewrite: Rewrite | None


@dataclass(frozen=True, slots=True)
class TemplateAudit:
    """What the chat template does with the usual conversations."""

    cases: tuple[AuditCase, ...]
    stop_tokens: tuple[str, ...]
    """What ends an answer, the call of a tool included."""
    shows_tools: bool
    """The schemas of tools reach the prompt."""
    writes_calls: bool
    """Calls in the history are written by the template; else the renderer writes them as hermes would."""

    @property
    def append_only(self) -> bool:
        """No kind of conversation is rewritten."""
        return all(case.rewrite is None for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """For a file of the run."""
        return {"append_only": self.append_only, **asdict(self)}

    @property
    def refused(self) -> dict[str, str]:
        """The kinds of conversations that the template does not take, and what it says."""
        return {case.name: case.rewrite.example for case in self.failures("accepted") if case.rewrite is not None}

    def failures(self, name: Property) -> tuple[AuditCase, ...]:
        """The cases that break this property."""
        return tuple(case for case in self.cases if case.rewrite is not None and case.rewrite.property == name)


def user_says(text: str) -> Message:
    return {"role": "user", "content": text}


def model_says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def model_calls(text: str, *values: str) -> Message:
    calls = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": "look_up", "arguments": {"word": value}}}
        for i, value in enumerate(values)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def tool_says(text: str, index: int = 0) -> Message:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"call{index:05d}", "content": text}


def audited_conversations() -> dict[str, list[tuple[list[Message], list[Message]]]]:
    """Conversations and what is added to them; those of one name differ in the answer alone."""
    ask, more, thought = (user_says("Name a word."), [user_says("Another one.")], "<think>\nLet me see.\n</think>\n\n")
    one, two = [tool_says("found")], [tool_says("found"), tool_says("found", 1)]
    called = [ask, model_calls("", "word"), *one]
    return {
        RESPONSE_CASE: [([ask, model_says(word)], more) for word in PROBES],
        "a user's message after an answer with thinking": [
            ([ask, model_says(thought + word)], more) for word in PROBES
        ],
        RESULT_CASE: [([ask, model_calls("", word)], one) for word in PROBES],
        "a result after text and a call": [([ask, model_calls("So.", word)], one) for word in PROBES],
        "a result after a call with thinking": [([ask, model_calls(thought, word)], one) for word in PROBES],
        "results of two calls": [([ask, model_calls("", word, word)], two) for word in PROBES],
        "a result after a later call": [([*called, model_calls("", word)], one) for word in PROBES],
        "a user's message after the use of a tool": [([*called, model_says(word)], more) for word in PROBES],
    }

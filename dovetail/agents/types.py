"""What passes between a conversation, its tools and whoever drives it. Plain data; knows no engine and no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    from dovetail.rollout.assemble import Response  # brings torch, which a file of tools can do without

Message: TypeAlias = dict[str, Any]
"""A chat message in OpenAI's form: role, content, and for the assistant `tool_calls`."""

Schemas: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools as the chat template shows them, in OpenAI's form."""

Outcome = Literal["finished", "length", "max_turns", "time_limit", "tool_error", "infra", "aborted"]
"""How a trajectory ended.

`finished`, `length`, `max_turns` and `time_limit` are graded as they are. `tool_error` (code of a tool, an environment
or a loop broke off with an exception), `infra` (what is around a tool failed, more often than is retried) and `aborted`
say nothing of the policy: they are masked and counted, never scored 0.
"""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
GRADED: frozenset[Outcome] = frozenset({"finished", "length", "max_turns", "time_limit"})


class InfrastructureError(Exception):
    """What is around a tool failed, not the policy: a sandbox that does not start, a server that is not there.

    Tools raise it. The call is tried again (elsewhere, where the tool can), `multi_turn.infra_attempts` times; then
    the trajectory ends with outcome `infra`. Every other exception of a tool is an observation for the policy.
    """


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data set, for one trajectory."""

    messages: list[Message]
    row: Mapping[str, Any] = field(default_factory=dict)
    """The columns beside the prompt: data_source, reward_model, extra_info, ... as the data set has them."""
    uid: str = ""
    """Of the group; all samples of a prompt have it."""
    sample: int = 0
    """Number in the group."""
    attempt: int = 0
    """Times the trajectory was started again, after a resume that could not restore its environment."""
    seed: int = 0
    """Of this sample: what an environment should draw its random numbers from."""
    validate: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a parser read it. `arguments` is None where the text was not valid; `error` then says why."""

    name: str
    arguments: dict[str, Any] | None
    id: str = ""
    """Of this call alone in its trajectory; the session gives it."""
    text: str = ""
    """The call as the model wrote it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gives back to the model."""

    text: str
    reward: float | None = None
    """For the turn that called; added to the trajectory's turn rewards."""
    done: bool = False
    """The environment is at its end: no further turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    """What kind of error the text reports, for the events: "invalid call", "exception" or "not shown"."""


def checked_reward(value: Any, what: str) -> float:
    """A reward from the user's code as a number. A NaN would count as no reward further on."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {value!r}; it must be a finite number.")
    return number


class OpenTools(Protocol):
    """The tools of one trajectory, and what they remember between calls.

    Those of a simulated user or an environment also have `async respond(messages) -> ToolResult | None`: the next user
    message, to a conversation that ends with a turn without calls; None: the conversation is over.
    """

    schemas: list[dict[str, Any]]
    """OpenAI's function schemas, for the chat template."""

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Exceptions but `InfrastructureError` become an observation."""
        ...

    async def reward(self) -> float | None:
        """At the end: the environment's own score of the trajectory; None where it has none."""
        return None

    def state(self) -> Any:
        """For an exact resume, a JSON value that `Toolbox.open` takes back; None where it cannot be restored."""
        return None

    async def close(self) -> None:
        """Give back what is held; nothing, usually."""
        return None


class Toolbox(Protocol):
    """All tools of a run. Built once in the engine's process; `open` is called for each trajectory."""

    async def open(self, task: Task, state: Any = None) -> tuple[OpenTools, list[Message]]:
        """The trajectory's own tools, and messages that the environment adds to the prompt (usually none)."""
        ...

    async def close(self) -> None:
        """Give back what is held; nothing, usually."""
        return None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote in one turn."""

    message: Message
    """The assistant's message, to be appended to the conversation as it is."""
    text: str
    """Its content, without the calls."""
    calls: tuple[ToolCall, ...]
    finish_reason: str
    token_ids: tuple[int, ...]
    node: int
    """Number of the turn in the trajectory's tree."""
    num_prompt_tokens: int = 0
    """What the model had read when it began."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A row for training: a prompt, then sampled and observed tokens. A trajectory that is never rewritten has one."""

    prompt_ids: tuple[int, ...]
    response: Response
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(position of the turn's last sampled token in the response, reward)."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished conversation. Each sampled token is `sampled` in exactly one segment."""

    task: Task
    segments: tuple[Segment, ...]
    outcome: Outcome
    reward: float | None = None
    """The environment's, the loop's or the endpoint's score; None: the reward function of the run scores it."""
    messages: tuple[Message, ...] = ()
    """The conversation of the last segment, for reward functions and for people."""
    events: tuple[Mapping[str, Any], ...] = ()
    """What happened, for the page: {"kind": "generate" | "tool" | "retry" | "branch" | "error" | "loop", "turn",
    "seconds", and for tools "name", "arguments", "result", "failure", "metrics"}."""
    error: str = ""
    """For outcomes `tool_error` and `infra`: what was raised."""
    num_turns: int = 0

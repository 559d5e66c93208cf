"""Run an agent loop written for verl as a loop of a session, and check its output against what the engine gave.

Ids are kept as the loop puts them together. Log-probs and weight versions come from the session's record, never from
the loop: a token with mask 1 that was not sampled there is an error. verl does not look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from dovetail.agents.loops import AgentLoop
from dovetail.agents.session import Session, TrajectoryEnd
from dovetail.agents.types import Segment, Task, ToolCall
from dovetail.agents.verl.adapters import extra_of
from dovetail.agents.verl.agent_loop import (
    AgentLoopOutput,
    DictConfigWrap,
    LLMServerClient,
    TokenOutput,
    ToolListWrap,
    refuse_media,
)
from dovetail.agents.verl.bases import OpenAIFunctionToolSchema, ToolResponse
from dovetail.rollout.assemble import NO_VERSION, Response
from dovetail.rollout.base import FinishReason, GenerationResult

Place = tuple[int, int]
"""Number of a turn, and of a token in it."""
_LIMITS = ("max_tokens", "max_new_tokens")
_WITHOUT_EFFECT = ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")
"""They concern the text that a server gives back beside the ids."""


def verl_loop(make: Callable[..., Any]) -> AgentLoop:
    """A loop from a subclass of verl's `AgentLoopBase`, or a partial of one."""
    configs: list[Any] = []  # the run's, and the same as verl has it: made once

    async def loop(task: Task, session: Session) -> float | None:
        settings = session.settings
        if not configs or configs[0] is not settings.config:
            configs[:] = [settings.config, OmegaConf.create(settings.config.model_dump(mode="json"))]
        messages = session.tools.after(task.messages)
        server = ServerManager(session, messages)
        built = make(
            trainer_config=DictConfigWrap(configs[1]),
            server_manager=server,
            tokenizer=settings.renderer.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(configs[1].data),
            hf_model_type=None,
            tools=ToolListWrap([_Tool(schema, session) for schema in session.tools.schemas]),
        )
        return _finish(await built.run(server.params(), **_columns(task, messages)), session)

    return loop


def _columns(task: Task, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What verl's data set gives for a row."""
    extra = task.row.get("extra_info")
    index = extra.get("index", 0) if isinstance(extra, Mapping) else 0
    derived = {name: extra_of(task, name) or {} for name in ("tools_kwargs", "interaction_kwargs")}
    row = {name: value for name, value in task.row.items() if name != "agent_name"}
    return {"index": index, **row, **derived, "raw_prompt": messages, "uid": task.uid}


class ServerManager(LLMServerClient):
    """`self.server_manager` of a loop: a session under verl's name."""

    def __init__(self, session: Session, messages: list[dict[str, Any]]) -> None:
        self.renderer = session.settings.renderer
        self._session = session
        self._messages = messages

    def params(self) -> dict[str, Any]:
        """What a loop is given as `sampling_params`."""
        names = ("temperature", "top_p", "top_k")
        given = {name: getattr(self._session.sampling, name) for name in names}
        return {**given, "repetition_penalty": 1.0, "logprobs": True}

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """The model's next tokens. The ids say what a turn continues, so that `request_id` is not needed."""
        refuse_media(image_data, video_data, audio_data)
        turn = await self._session.generate(
            [int(token) for token in prompt_ids], messages=self._messages, **self._limits(sampling_params or {})
        )
        result = self._session.tree[turn.node].result
        versions = result.weight_versions or [NO_VERSION]
        steps = {"global_steps": versions[-1], "min_global_steps": min(versions), "max_global_steps": max(versions)}
        reason = "aborted" if result.finish_reason == "abort" else "completed"
        return TokenOutput(
            token_ids=result.token_ids, log_probs=result.log_probs, stop_reason=reason, extra_fields=steps
        )

    def _limits(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a loop may choose for a turn: where it ends. How tokens are sampled is the run's."""
        left, given = dict(params), self.params()
        limits = [int(left.pop(name)) for name in _LIMITS if left.get(name) is not None]
        stop, stop_token_ids = left.pop("stop", None) or (), left.pop("stop_token_ids", None) or ()
        for name, value in left.items():
            if name in (*_LIMITS, *_WITHOUT_EFFECT) or value is None or (name, value) in (("n", 1), ("min_p", 0)):
                continue
            if name not in given:
                raise ValueError(
                    f"sampling_params[{name!r}]={value!r} is not supported in a turn; a loop may set "
                    "max_tokens, stop and stop_token_ids."
                )
            if name != "logprobs" and value != given[name]:
                raise ValueError(
                    f"sampling_params[{name!r}]={value!r} differs from the run's {given[name]!r}: the trainer computes "
                    f"log-probs with the run's. Set rollout.{name} instead."
                )
        return {
            "max_new_tokens": min(limits, default=None),
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "stop_token_ids": tuple(stop_token_ids),
        }


class _Tool:
    """A tool of the run as verl hands it to a loop: behind the session's deadlines, retries and record."""

    def __init__(self, schema: dict[str, Any], session: Session) -> None:
        self.tool_schema = OpenAIFunctionToolSchema(**schema)
        self.name = self.tool_schema.function.name
        self._session = session

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        return instance_id or self.name, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> tuple[ToolResponse, Any, Any]:
        result = await self._session.tools.call(ToolCall(self.name, parameters))
        return ToolResponse(text=result.text), result.reward, dict(result.metrics)

    async def release(self, instance_id: str, **_: Any) -> None:
        """With the trajectory."""


# ---- the output ----


def _finish(output: Any, session: Session) -> float | None:
    """Take the output as the trajectory's rows; the reward of the last one. Several outputs are several rows."""
    outputs = output if isinstance(output, list) else [output]
    for one in outputs:
        if not hasattr(one, "response_mask"):
            kind = type(one).__name__
            raise ValueError(f"run returned {kind}; it must return an AgentLoopOutput, or a list of them.")
        refuse_media(*(one.multi_modal_data or {}).values())
    session.events += [_event(one) for one in outputs]
    if not session.turns and not any(any(one.response_mask) for one in outputs):
        return None  # the runner says that the model was not asked
    used: set[Place] = set()
    rows = [_row(one, session, used) for one in outputs]
    session.use_rows(rows)
    reward = outputs[-1].reward_score
    if rows[-1].response.finish_reason == "length":
        raise TrajectoryEnd("length", reward)
    return reward


def _event(output: AgentLoopOutput) -> dict[str, Any]:
    """What the loop says of its trajectory, for the metrics `loop/*`, reward functions and the record."""
    measured = {"num_turns": output.num_turns, **output.metrics.model_dump()}
    numbers = {name: float(value) for name, value in measured.items() if isinstance(value, (int, float))}
    if numbers.get("num_preempted") == -1:  # not known
        del numbers["num_preempted"]
    fields = {}
    for name, value in output.extra_fields.items():
        plain = value.tolist() if hasattr(value, "tolist") else value
        try:
            fields[name] = json.loads(json.dumps(plain))
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise ValueError(f"AgentLoopOutput.extra_fields[{name!r}] is {kind}: {error}; give JSON values.") from None
    return {"kind": "loop", "turn": None, "metrics": numbers, "extra_fields": fields}


def _row(output: AgentLoopOutput, session: Session, used: set[Place]) -> Segment:
    """The output with the engine's own log-probs. What two rows share is trained in the first one."""
    prompt, ids, mask = list(output.prompt_ids), list(output.response_ids), list(output.response_mask)
    if len(ids) != len(mask):
        raise ValueError(f"response_mask has {len(mask)} entries for {len(ids)} response_ids; give one for each.")
    settings = session.settings
    lengths = {"prompt": (prompt, settings.prompt_length), "response": (ids, settings.response_length)}
    for name, (tokens, most) in lengths.items():
        if len(tokens) > most:
            raise ValueError(f"{name}_ids has {len(tokens)} tokens, more than rollout.{name}_length={most}; cut it.")
    places = _places([*prompt, *ids], session, used)[len(prompt) :]
    trained, log_probs, versions = [False] * len(ids), [0.0] * len(ids), [NO_VERSION] * len(ids)
    results = {place[0]: session.tree[place[0]].result for place in places if place is not None}
    for position, (wanted, place) in enumerate(zip(mask, places, strict=True)):
        if wanted and place is None:
            raise ValueError(_not_sampled(ids, position, session))
        if not wanted or place is None or place in used:
            continue
        used.add(place)
        turn, token = place
        trained[position] = True
        log_probs[position] = results[turn].log_probs[token]
        versions[position] = results[turn].weight_versions[token]
    is_cut = _is_cut(places, results, is_full=len(ids) == settings.response_length)
    reason: FinishReason = "length" if is_cut else "stop"
    return Segment(tuple(prompt), Response(tuple(ids), tuple(trained), tuple(log_probs), tuple(versions), reason))


def _places(ids: list[int], session: Session, used: set[Place]) -> list[Place | None]:
    """For each id the turn that sampled it, after exactly the ids before it here; one that no row has, if there is."""
    places: list[Place | None] = [None] * len(ids)
    taken = {turn for turn, _ in used}
    found = sorted((same, turn not in taken, turn, at) for turn, (at, same) in session.tree.matches(ids).items())
    for same, _, turn, at in found:  # of several turns after the same ids, the longest match
        places[at : at + same] = [(turn, token) for token in range(same)]
    return places


def _is_cut(places: Sequence[Place | None], results: Mapping[int, GenerationResult], *, is_full: bool) -> bool:
    """Whether the row ends within a turn because no room was left."""
    if not places or places[-1] is None:
        return False
    turn, token = places[-1]
    is_last = token + 1 == len(results[turn].token_ids)
    return results[turn].finish_reason == "length" if is_last else is_full


def _not_sampled(ids: Sequence[int], position: int, session: Session) -> str:
    token = ids[position]
    text = session.settings.renderer.tokenizer.decode([token])
    return (
        f"response_mask is 1 at position {position} of response_ids (token {token}, {text!r}), but no generate call of "
        "this trajectory sampled that token after the ids before it. Put output.token_ids into the row as they are, "
        "instead of encoding their text again, and set response_mask to 0 on everything else."
    )

"""Lengths against the model's context, the engine's limits and the overlong buffer."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.checks.checked import MODEL, ROLLOUT, Checked, error, warning
from dovetail.config.errors import Problem


def sequences_fit_in_the_context(run: Checked) -> Iterator[Problem]:
    context = run.shape.context_length if run.shape else None
    rollout = run.config.actor_rollout_ref.rollout
    if context is None:
        return
    if run.longest > context:
        room = context - rollout.prompt_length
        fix = f"use data.max_response_length={room}" if room > 0 else "use shorter prompts and responses"
        yield error(
            "data.max_response_length",
            f"data.max_prompt_length={rollout.prompt_length} + data.max_response_length={rollout.response_length} = "
            f"{run.longest} tokens exceed the model's context of {context}; {fix}, or stretch the context with "
            f"+{MODEL}.override_config.rope_scaling.",
        )
    elif rollout.max_model_len and rollout.max_model_len > context:
        key = f"{ROLLOUT}.max_model_len"
        yield error(key, f"{key}={rollout.max_model_len} exceeds the model's context of {context}; use {context}.")


def engine_holds_prompt_and_response(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.max_model_len"
    if rollout.max_model_len and rollout.max_model_len < run.longest:
        yield error(
            key,
            f"{key}={rollout.max_model_len} is less than data.max_prompt_length + data.max_response_length = "
            f"{run.longest}, so responses would be cut short; use {run.longest}, or null.",
        )


def lengths_agree(run: Checked) -> Iterator[Problem]:
    rollout, data = run.config.actor_rollout_ref.rollout, run.config.data
    for name, value, source, wanted in (
        ("prompt_length", rollout.prompt_length, "data.max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "data.max_response_length", data.max_response_length),
    ):
        if value != wanted:
            yield error(
                f"{ROLLOUT}.{name}",
                f"{ROLLOUT}.{name}={value} disagrees with {source}={wanted}; set one of them, the other follows.",
            )


def engine_steps_hold_a_prefill(run: Checked) -> Iterator[Problem]:
    rollout = run.config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.max_num_batched_tokens"
    # The other engines have no such limit on a step, or ignore it.
    if rollout.name != "vllm":
        return
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.context_length:
        yield error(
            key,
            f"{key}={rollout.max_num_batched_tokens} is less than one sequence of {rollout.context_length} tokens and "
            f"{ROLLOUT}.enable_chunked_prefill=False; use {rollout.context_length}, or enable_chunked_prefill=True.",
        )
    elif rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield error(
            key,
            f"{key}={rollout.max_num_batched_tokens} is less than {ROLLOUT}.max_num_seqs={rollout.max_num_seqs}: "
            f"a step decodes one token per sequence; use {rollout.max_num_seqs} or more.",
        )


def overlong_buffer_is_inside_the_response(run: Checked) -> Iterator[Problem]:
    reward, limit = run.config.reward_model, run.config.overlong_limit
    buffer, response = reward.overlong_buffer, run.config.data.max_response_length
    if not buffer.enable:
        return
    if buffer.len == 0:
        yield warning(
            "reward_model.overlong_buffer.len",
            "reward_model.overlong_buffer.len=0 leaves no tokens over which the penalty grows, so there is none; "
            f"use a fifth of the response, e.g. {max(1, response // 5)}, or enable=False.",
        )
    elif buffer.len > limit:
        yield error(
            "reward_model.overlong_buffer.len",
            f"reward_model.overlong_buffer.len={buffer.len} is more than the longest response of {limit} tokens; "
            f"use {max(1, limit // 5)} or so.",
        )
    elif buffer.len == limit:
        yield warning(
            "reward_model.overlong_buffer.len",
            f"reward_model.overlong_buffer.len={buffer.len} is the longest response of {limit} tokens, so every "
            f"response is punished for its length; use {max(1, limit // 5)} or so to punish the long ones.",
        )
    elif limit != response:
        yield warning(
            "reward_model.max_resp_len",
            f"reward_model.max_resp_len={limit} differs from data.max_response_length={response}, so the penalty ends "
            f"elsewhere than the responses do; use {response}.",
        )
    if reward.reward_manager not in ("dapo",) and reward.reward_manager_module.path is None:
        yield warning(
            "reward_model.reward_manager",
            f"reward_model.overlong_buffer.enable=True is read by reward_manager=dapo, here {reward.reward_manager}; "
            "set reward_model.reward_manager=dapo.",
        )

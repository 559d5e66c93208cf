"""The engine's size, lengths and sampling, in training and in validation."""

from __future__ import annotations

import math

from dovetail.config.checks.examined import Check, Examined, Findings, nearest_divisor
from dovetail.config.fsdp import full_dtype

_TENSOR = "rollout.tensor_model_parallel_size"


def _engine_size(run: Examined) -> Findings:
    rollout, world, shape = run.rollout, run.layouts["rollout"].world_size, run.shape
    key, tensor, size = _TENSOR, rollout.tensor_model_parallel_size, rollout.engine_world_size
    per_node = rollout.n_gpus_per_node if rollout.own_devices else run.trainer.n_gpus_per_node
    if world % size:
        yield run.error(
            f"<{key}> x pipeline {rollout.pipeline_model_parallel_size} x data {rollout.data_parallel_size} = {size} "
            f"do not divide the {world} devices; use {max(1, nearest_divisor(world, size) // (size // tensor))}."
        )
    else:
        if shape is not None and shape.num_heads % tensor:
            best = nearest_divisor(math.gcd(shape.num_heads, world), tensor)
            yield run.error(f"<{key}> does not divide the model's {shape.num_heads} attention heads; use {best}.")
        if tensor > per_node:
            yield run.warning(f"<{key}> spreads layers over nodes, which is slow; use {per_node} if the model fits.")
    replicas = tensor * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, replicas):
        yield run.error(
            "<rollout.expert_parallel_size> must be 1 or tensor_model_parallel_size x data_parallel_size; use "
            f"{replicas}."
        )
    elif rollout.expert_parallel_size > 1 and shape is not None and not shape.is_moe:
        yield run.error(f"<rollout.expert_parallel_size>, but {shape.model_type} has no experts to share; use 1.")


def _devices(run: Examined) -> Findings:
    shared, rollout = run.config.actor_rollout_ref.hybrid_engine, run.rollout
    if not shared and rollout.nnodes == 0:
        yield run.error(
            "<rollout.nnodes> and <actor_rollout_ref.hybrid_engine> gives generation its own devices; set "
            "@rollout.nnodes=1 and n_gpus_per_node, or hybrid_engine=True."
        )
    elif shared and rollout.nnodes > 0:
        yield run.error(
            "<rollout.nnodes> asks for devices of its own and <actor_rollout_ref.hybrid_engine> shares the trainer's; "
            "set hybrid_engine=False, or nnodes=0."
        )
    elif rollout.weight_sync == "colocated" and rollout.nnodes > 0:
        yield run.error("<rollout.weight_sync> needs the trainer's devices and <rollout.nnodes>; use broadcast.")
    if rollout.kv_cache_dtype == "fp8" and run.trainer.device == "cpu":
        yield run.error("<rollout.kv_cache_dtype> needs CUDA and trainer.device=cpu; use @rollout.kv_cache_dtype=auto.")
    precision = run.actor.fsdp_config.mixed_precision
    if rollout.exact and full_dtype(rollout.dtype) != (compute := full_dtype(precision.param_dtype)):
        yield run.error(
            f"<rollout.exact> and <rollout.dtype>, but the trainer computes in {compute} (actor.fsdp_config."
            f"mixed_precision.param_dtype); use @rollout.dtype={compute}."
        )


def _samples(run: Examined) -> Findings:
    rollout = run.rollout
    greedy = "do_sample=False" if not rollout.do_sample else "temperature=0" if rollout.temperature == 0 else None
    # Log-probs are trained under the temperature of the samples; under that of a greedy choice they are not numbers.
    if greedy:
        why = f"makes the {rollout.n} responses to a prompt identical" if rollout.n > 1 else "never explores"
        yield run.error(f"@rollout.{greedy} {why}; use @rollout.do_sample=True and @rollout.temperature=1.0.")
    yield from _truncation(run)
    val, key = rollout.val_kwargs, "rollout.val_kwargs"
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield run.warning(
            f"<{key}.n> gives identical greedy responses; use @{key}.do_sample=True and @{key}.temperature=1.0, or n=1."
        )
    elif val.do_sample and val.temperature == 0:
        yield run.warning(f"@{key}.temperature=0 with do_sample=True is greedy; use 1.0 to sample, or do_sample=False.")


def _truncation(run: Examined) -> Findings:
    rollout = run.rollout
    neutral = {"top_p": 1.0, "top_k": 0 if rollout.top_k == 0 else -1, "min_p": 0.0}
    cut = {name: value for name, value in neutral.items() if getattr(rollout, name) != value}
    if rollout.keep_sampling_mask and not cut:
        yield run.error("<rollout.keep_sampling_mask>, and nothing is cut; use False, or @rollout.top_k=20.")
    elif rollout.keep_sampling_mask and rollout.top_k < 1:
        yield run.error(
            "<rollout.keep_sampling_mask> keeps up to top_k tokens at every place and <rollout.top_k> is no bound; use "
            "@rollout.top_k=512, which removes little beside what top_p or min_p do."
        )
    elif not rollout.keep_sampling_mask:
        for name, value in cut.items():
            yield run.warning(
                f"<rollout.{name}> samples from a cut distribution, and log-probs are of the whole one: ratios and "
                "gradients are biased, and rollout_corr/kl does not show it. Use @rollout.keep_sampling_mask=True with "
                f"top_k and name=native, or use {name}={value} and temperature alone (val_kwargs is for validation)."
            )


def _conversations(run: Examined) -> Findings:
    rollout = run.rollout
    if not rollout.uses_agents and rollout.multi_turn.tool_config_path:
        yield run.warning("<rollout.multi_turn.enable>, so the tools of tool_config_path are never called; use True.")
    elif rollout.uses_agents and not run.data.return_raw_chat:
        yield run.error("<data.return_raw_chat> leaves out the messages that conversations begin with; use True.")
    elif rollout.uses_agents and rollout.engine_world_size > 1:
        yield run.error(f"<{_TENSOR}> with conversations: each process of an engine would drive its own; use 1.")
    turns, agent = rollout.multi_turn, rollout.agent
    answers = (turns.tool_config_path, turns.function_tool_path, turns.mcp_servers, turns.interaction_config_path)
    # Rows name loops in `agent_name`; modules may register them.
    loops = (agent.environment, agent.command, agent.agent_loop_config_path, run.trainer.import_modules)
    is_ours = agent.default_agent_loop in ("single_turn_agent", "tool_agent")
    if turns.enable and is_ours and not any((*answers, *loops)):
        yield run.warning(
            "<rollout.multi_turn.enable>, and nothing replies to the model: every response is one turn. Add tools with "
            "function_tool_path, tool_config_path or mcp_servers beside it, a simulated user with "
            "interaction_config_path, or @rollout.agent.environment or @rollout.agent.command; or use False."
        )


def _lengths(run: Examined) -> Findings:
    rollout, context = run.rollout, run.shape.context_length if run.shape else None
    limit, prompt, response = rollout.max_model_len, rollout.prompt_length, rollout.response_length
    if context is not None and run.longest > context:
        room = context - prompt
        fix = f"use data.max_response_length={room}" if room > 0 else "use shorter prompts and responses"
        yield run.error(
            f"@data.max_response_length={response} + data.max_prompt_length={prompt} = {run.longest} tokens exceed "
            f"the model's context of {context}; {fix}, or stretch it with +@model.override_config.rope_scaling."
        )
    elif context is not None and limit and limit > context:
        yield run.error(f"<rollout.max_model_len> exceeds the model's context of {context}; use {context}.")
    if limit and limit < run.longest:
        yield run.error(f"<rollout.max_model_len> cannot hold prompt and response; use {run.longest}, or null.")
    for name in ("prompt_length", "response_length"):
        if getattr(rollout, name) != getattr(run.data, f"max_{name}"):
            yield run.error(f"<rollout.{name}> disagrees with <data.max_{name}>; set one of them, the other follows.")


def _engine_steps(run: Examined) -> Findings:
    rollout = run.rollout
    length, sequences = rollout.context_length, rollout.max_num_seqs
    # The other engines have no such limit on a step, or ignore it.
    if rollout.name != "vllm":
        return
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < length:
        yield run.error(
            f"<rollout.max_num_batched_tokens> is less than one sequence of {length} tokens and "
            f"<rollout.enable_chunked_prefill>; use {length}, or enable_chunked_prefill=True."
        )
    elif rollout.max_num_batched_tokens < sequences:
        yield run.error(
            "<rollout.max_num_batched_tokens> is less than <rollout.max_num_seqs>: a step decodes one token per "
            f"sequence; use {sequences} or more."
        )


def _overlong_buffer(run: Examined) -> Findings:
    buffer, limit = run.config.reward_model.overlong_buffer, run.config.overlong_limit
    key, fifth = "reward_model.overlong_buffer.len", f"use {max(1, limit // 5)} or so"
    if not buffer.enable:
        return
    if buffer.len == 0:
        yield run.warning(f"<{key}> is no room in which the penalty could grow; {fifth}.")
    elif buffer.len > limit:
        yield run.error(f"<{key}> is more than the longest response of {limit} tokens; {fifth}.")
    elif buffer.len == limit:
        yield run.warning(f"<{key}> punishes every response: the longest has {limit} tokens; {fifth}.")
    elif limit != run.data.max_response_length:
        yield run.warning("<reward_model.max_resp_len> differs from <data.max_response_length>; use the same.")


_ENGINE: tuple[Check, ...] = (_engine_size, _devices, _engine_steps)
ROLLOUT: tuple[Check, ...] = (*_ENGINE, _samples, _conversations, _lengths, _overlong_buffer)

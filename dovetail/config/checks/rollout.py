"""The engine's size, lengths and sampling, in training and in validation."""

from __future__ import annotations

import math

from dovetail.config.checks.examined import Check, Examined, Findings, nearest_divisor


def _engine_size(run: Examined) -> Findings:
    rollout, world, shape = run.config.actor_rollout_ref.rollout, run.layouts["rollout"].world_size, run.shape
    tensor, size = rollout.tensor_model_parallel_size, rollout.engine_world_size
    per_node = rollout.n_gpus_per_node if rollout.own_devices else run.config.trainer.n_gpus_per_node
    if world % size:
        yield run.error(
            f"<rollout.tensor_model_parallel_size> x pipeline {rollout.pipeline_model_parallel_size} x data "
            f"{rollout.data_parallel_size} = {size} devices per engine do not divide the {world} devices; "
            f"use {max(1, nearest_divisor(world, size) // (size // tensor))}."
        )
    else:
        if shape is not None and shape.num_heads % tensor:
            yield run.error(
                f"<rollout.tensor_model_parallel_size> does not divide the model's {shape.num_heads} attention heads; "
                f"use {nearest_divisor(math.gcd(shape.num_heads, world), tensor)}."
            )
        if tensor > per_node:
            yield run.warning(
                f"<rollout.tensor_model_parallel_size> spreads each layer over nodes of {per_node} devices, which is "
                f"slow without a fast interconnect; use {per_node} if the model fits."
            )
    replicas = tensor * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, replicas):
        yield run.error(
            "<rollout.expert_parallel_size> must be 1 or tensor_model_parallel_size x data_parallel_size: engines "
            f"share experts over all of their devices; use {replicas}."
        )
    elif rollout.expert_parallel_size > 1 and shape is not None and not shape.is_moe:
        yield run.error(f"<rollout.expert_parallel_size>, but {shape.model_type} has no experts to share; use 1.")


def _devices(run: Examined) -> Findings:
    policy, rollout = run.config.actor_rollout_ref, run.config.actor_rollout_ref.rollout
    if not policy.hybrid_engine and rollout.nnodes == 0:
        yield run.error(
            "<rollout.nnodes> and <actor_rollout_ref.hybrid_engine> gives generation its own devices; set "
            "@rollout.nnodes=1 and n_gpus_per_node, or hybrid_engine=True."
        )
    elif policy.hybrid_engine and rollout.nnodes > 0:
        yield run.error(
            "<rollout.nnodes> asks for devices of its own and <actor_rollout_ref.hybrid_engine> shares the trainer's; "
            "set hybrid_engine=False, or nnodes=0."
        )
    elif rollout.weight_sync == "colocated" and rollout.nnodes > 0:
        yield run.error("<rollout.weight_sync> needs the trainer's devices and <rollout.nnodes>; use broadcast.")
    if rollout.kv_cache_dtype == "fp8" and run.config.trainer.device == "cpu":
        yield run.error("<rollout.kv_cache_dtype> needs CUDA and trainer.device=cpu; use @rollout.kv_cache_dtype=auto.")


def _samples(run: Examined) -> Findings:
    rollout = run.config.actor_rollout_ref.rollout
    greedy = "do_sample=False" if not rollout.do_sample else "temperature=0" if rollout.temperature == 0 else None
    # Log-probs are trained under the temperature of the samples; under that of a greedy choice they are not numbers.
    if greedy:
        why = f"makes the {rollout.n} responses to a prompt identical" if rollout.n > 1 else "never explores"
        yield run.error(f"@rollout.{greedy} {why}; use @rollout.do_sample=True and @rollout.temperature=1.0.")
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if getattr(rollout, name) != neutral and not (name == "top_k" and rollout.top_k == 0):
            yield run.warning(
                f"<rollout.{name}> samples from another distribution than the one whose log-probs are trained; use "
                f"{neutral} in training (validation has its own in val_kwargs)."
            )
    val, key = rollout.val_kwargs, "rollout.val_kwargs"
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield run.warning(
            f"<{key}.n> gives identical greedy responses; use @{key}.do_sample=True and @{key}.temperature=1.0, or n=1."
        )
    elif val.do_sample and val.temperature == 0:
        yield run.warning(f"@{key}.temperature=0 with do_sample=True is greedy; use 1.0 to sample, or do_sample=False.")


def _conversations(run: Examined) -> Findings:
    rollout, turns = run.config.actor_rollout_ref.rollout, run.config.actor_rollout_ref.rollout.multi_turn
    if not rollout.uses_agents and turns.tool_config_path:
        yield run.warning("<rollout.multi_turn.enable>, so the tools of tool_config_path are never called; use True.")
    elif rollout.uses_agents and not run.config.data.return_raw_chat:
        yield run.error("<data.return_raw_chat> leaves out the messages that conversations begin with; use True.")
    elif rollout.uses_agents and rollout.engine_world_size > 1:
        yield run.error(
            f"<rollout.tensor_model_parallel_size> with conversations: the {rollout.engine_world_size} processes of an "
            "engine would each drive its own; use 1."
        )


def _lengths(run: Examined) -> Findings:
    rollout, context = run.config.actor_rollout_ref.rollout, run.shape.context_length if run.shape else None
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
        yield run.error(
            f"<rollout.max_model_len> is less than data.max_prompt_length + data.max_response_length = {run.longest}; "
            f"use {run.longest}, or null."
        )
    for name in ("prompt_length", "response_length"):
        if getattr(rollout, name) != getattr(run.config.data, f"max_{name}"):
            yield run.error(f"<rollout.{name}> disagrees with <data.max_{name}>; set one of them, the other follows.")


def _engine_steps(run: Examined) -> Findings:
    rollout = run.config.actor_rollout_ref.rollout
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
    reward, limit = run.config.reward_model, run.config.overlong_limit
    buffer, response = reward.overlong_buffer, run.config.data.max_response_length
    if not buffer.enable:
        return
    fifth = f"use {max(1, limit // 5)} or so"
    if buffer.len == 0:
        yield run.warning(f"<reward_model.overlong_buffer.len> is no room in which the penalty could grow; {fifth}.")
    elif buffer.len > limit:
        yield run.error(
            f"<reward_model.overlong_buffer.len> is more than the longest response of {limit} tokens; {fifth}."
        )
    elif buffer.len == limit:
        yield run.warning(
            f"<reward_model.overlong_buffer.len> is the longest response of {limit} tokens, so every response is "
            f"punished for its length; {fifth} to punish the long ones."
        )
    elif limit != response:
        yield run.warning(
            "<reward_model.max_resp_len> differs from <data.max_response_length>, so the penalty ends elsewhere than "
            f"the responses do; use {response}."
        )


ROLLOUT: tuple[Check, ...] = (
    _engine_size,
    _devices,
    _samples,
    _conversations,
    _lengths,
    _engine_steps,
    _overlong_buffer,
)

"""What resolves and can be planned but cannot be run by this version: refused at the start of a run, never passed over.

`dovetail check` shows the same sentences as notices. Whether keys fit each other is asked in `dovetail.config.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.config.actor import ActorConfig
from dovetail.config.critic import CriticConfig
from dovetail.config.errors import ConfigError, Problem
from dovetail.config.rollout import RolloutConfig
from dovetail.config.root import DovetailConfig

_POLICY = "actor_rollout_ref"
_ROLLOUT = f"{_POLICY}.rollout"


def unsupported_in_runs(config: DovetailConfig) -> list[Problem]:
    """Every wish of `config` that no part of this version can fulfil. Roles that do not run are not asked."""
    parts = (_backends, _optimizers, _networks, _engine, _sampling, _placement, _loss)
    return [
        Problem(key, f"{key}={value} cannot be run in this version: {why}.")
        for part in parts
        for key, value, why in part(config)
    ]


def refuse_unsupported(config: DovetailConfig) -> None:
    """Raise `ConfigError` with everything that cannot be run."""
    if problems := unsupported_in_runs(config):
        raise ConfigError(problems)


Wish = tuple[str, object, str]


def _backends(config: DovetailConfig) -> Iterator[Wish]:
    if config.trainer.device == "npu":
        yield "trainer.device", "npu", "no backend here runs on it; use cuda, cpu or auto"


def _optimizers(config: DovetailConfig) -> Iterator[Wish]:
    roles: list[tuple[str, ActorConfig | CriticConfig]] = [(f"{_POLICY}.actor", config.actor_rollout_ref.actor)]
    if config.uses_critic:
        roles.append(("critic", config.critic))
    for name, role in roles:
        if role.optim.optimizer == "Muon" and role.strategy in ("megatron", "fsdp"):
            why = f"{role.strategy} splits or flattens the matrices that Muon needs whole; use strategy=fsdp2, or AdamW"
            yield f"{name}.optim.optimizer", "Muon", why


def _networks(config: DovetailConfig) -> Iterator[Wish]:
    models = {f"{_POLICY}.model": config.actor_rollout_ref.model}
    if config.uses_critic:
        models["critic.model"] = config.critic.model
        if config.critic.model.uses_lora:
            yield "critic.model.lora_rank", config.critic.model.lora_rank, "the critic is trained whole; use 0"
    for name, model in models.items():
        if model.hf_config_path not in (None, model.path):
            why = f"the config.json beside the weights is read; change fields with {name}.override_config"
            yield f"{name}.hf_config_path", model.hf_config_path, why
    adapter = config.actor_rollout_ref.model.lora_adapter_path
    if adapter is not None:
        why = "adapters start fresh; merge the adapter into the weights of model.path first"
        yield f"{_POLICY}.model.lora_adapter_path", adapter, why


def _engine(config: DovetailConfig) -> Iterator[Wish]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.mode == "server" and rollout.server_urls:
        yield from _servers(rollout)
    elif rollout.mode == "server" and rollout.name != "sglang":
        yield f"{_ROLLOUT}.mode", "server", "no server is started; give rollout.server_urls, or use sync"
    if rollout.quantization is not None:
        why = "weights that change after every step are not quantised again; use null"
        yield f"{_ROLLOUT}.quantization", rollout.quantization, why
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"):
        size = getattr(rollout, name)
        if size > 1 and not (name.startswith("tensor") and (rollout.name, rollout.mode) == ("vllm", "sync")):
            why = "each process has a whole engine; use 1 (only vllm with mode=sync is tensor parallel over processes)"
            yield f"{_ROLLOUT}.{name}", size, why
    if rollout.multi_turn.enable:
        yield f"{_ROLLOUT}.multi_turn.enable", True, "an answer is one turn, and no tool is called; use False"


def _servers(rollout: RolloutConfig) -> Iterator[Wish]:
    """Servers by URL, that must follow the trainer's weights."""
    if rollout.name == "native":
        why = "it runs in the trainer's process; say what the servers are: vllm or sglang"
        yield f"{_ROLLOUT}.name", "native", why
    if rollout.weight_sync == "colocated":
        yield f"{_ROLLOUT}.weight_sync", "colocated", "servers have memory of their own; use auto, disk or broadcast"
    elif rollout.weight_sync == "disk" and rollout.weights_folder is None:
        yield f"{_ROLLOUT}.weight_sync", "disk", f"it needs a folder that all servers see: {_ROLLOUT}.weights_folder"


def _sampling(config: DovetailConfig) -> Iterator[Wish]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.repetition_penalty != 1:
        yield f"{_ROLLOUT}.repetition_penalty", rollout.repetition_penalty, "no engine here applies it; use 1.0"
    if rollout.name == "native" and rollout.logprobs_mode == "raw_logprobs":
        why = "the native engine reports log-probs under the temperature; use temperature"
        yield f"{_ROLLOUT}.logprobs_mode", rollout.logprobs_mode, why


def _placement(config: DovetailConfig) -> Iterator[Wish]:
    policy, reward = config.actor_rollout_ref, config.reward_model
    if not policy.hybrid_engine and policy.rollout.weight_sync == "disk":
        why = "engines on devices of their own get weights from the trainer's processes; use broadcast"
        yield f"{_ROLLOUT}.weight_sync", "disk", why
    if reward.enable and reward.enable_resource_pool:
        why = "the reward network runs on the trainer's devices; use False"
        yield "reward_model.enable_resource_pool", True, why


def _loss(config: DovetailConfig) -> Iterator[Wish]:
    correction = config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        return
    if correction.loss_type == "reinforce" and loss_mode not in ("vanilla", "reinforce"):
        why = f"it asks for another loss than {_POLICY}.actor.policy_loss.loss_mode={loss_mode}; set one of the two"
        yield "algorithm.rollout_correction.loss_type", "reinforce", why
    if correction.rollout_is_batch_normalize:
        why = "bypass mode makes weights micro-batch by micro-batch and knows no mean over the batch; use False"
        yield "algorithm.rollout_correction.rollout_is_batch_normalize", True, why

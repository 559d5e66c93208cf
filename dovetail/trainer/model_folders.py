"""The models that a run names, before a process starts: fetched, looked at, and their tokenizer and processor."""

from __future__ import annotations

from typing import Any

from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.models.folder import check_model_folder
from dovetail.models.load import Role, load_config, load_processor, load_tokenizer, model_folder


def refuse_unknown_fields(config: DovetailConfig) -> None:
    """Fail here, instead of in every worker that builds a network with such a field."""
    sections = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if config.uses_critic:
        sections["critic.model"] = config.critic.model
    for name, model in sections.items():
        # Only workers import the module that may register the architecture.
        if not model.override_config or model.external_lib is not None:
            continue
        try:
            load_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            raise ConfigError([Problem(name, f"{name}.{error}")]) from error


def fetch_models(config: DovetailConfig) -> None:
    """Download models named on the hub into its cache, so that a missing one fails before a process starts.

    Workers on other machines fetch for themselves, into the cache of their machine.
    """
    paths = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if config.uses_critic:
        paths["critic.model.path"] = config.critic.model.path
    if config.reward_model.enable and config.reward_model.model.path:
        paths["reward_model.model.path"] = config.reward_model.model.path
    if config.distills and config.distill.teacher.path:
        paths["distill.teacher.path"] = config.distill.teacher.path
    for key, path in paths.items():
        try:
            model_folder(path)
        except FileNotFoundError as error:
            raise ConfigError([Problem(key, f"{key}={path}: {error}")]) from error


def refuse_broken_models(config: DovetailConfig) -> None:
    """Fail here, in one line, instead of in every worker that reads the folder."""
    policy, reward = config.actor_rollout_ref.model, config.reward_model
    folders: dict[tuple[str, Role], bool] = {(policy.path, "policy"): policy.trust_remote_code}
    if config.uses_critic:
        folders[config.critic.model.path, "value"] = config.critic.model.trust_remote_code
    if reward.enable and reward.model.path:
        folders[reward.model.path, "reward"] = reward.model.trust_remote_code
    if config.distills and config.distill.teacher.path and config.distill.teacher.external_lib is None:
        folders[config.distill.teacher.path, "policy"] = config.distill.teacher.trust_remote_code
    # Only workers import the module that may register the architecture.
    if policy.external_lib is None:
        for (path, role), trust_remote_code in folders.items():
            check_model_folder(model_folder(path), role, trust_remote_code=trust_remote_code)


def load_readers(config: DovetailConfig) -> tuple[Any, Any | None]:
    """The tokenizer, and the processor of a model that sees images, with the chat template that prompts are put in."""
    model = config.actor_rollout_ref.model
    trust = model.trust_remote_code
    tokenizer = load_tokenizer(config.data.tokenizer or model.tokenizer_source, trust_remote_code=trust)
    processor = load_processor(model.path, trust_remote_code=trust)
    if model.custom_chat_template is not None:
        for reader in (tokenizer, processor):
            if reader is not None:
                reader.chat_template = model.custom_chat_template
    return tokenizer, processor

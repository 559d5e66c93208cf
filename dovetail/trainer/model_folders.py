"""The models that a run names, before a process starts: fetched, looked at, and their tokenizer and processor."""

from __future__ import annotations

from typing import Any

from dovetail.config import ConfigError
from dovetail.config.adapter import adapter_folder
from dovetail.config.errors import Problem
from dovetail.config.hub import is_hub_name
from dovetail.config.model import ModelConfig
from dovetail.config.root import DovetailConfig
from dovetail.data.unread_tokenizer import UnreadTokenizer
from dovetail.models.folder import check_model_folder
from dovetail.models.load import Role, load_config, load_processor, load_tokenizer, model_folder
from dovetail.models.router_replay import refuse_unknown_routers
from dovetail.trainer.inputs import named_models, path_key
from dovetail.trainer.refusals import Refusals
from dovetail.workers.unsupported_models import refuse_for_megatron, refuse_for_native_engine


def refuse_unknown_fields(config: DovetailConfig) -> None:
    """Fail here, instead of in every worker that builds a network with such a field."""
    for name, model in _known_models(config).items():
        if not model.override_config:
            continue
        try:
            load_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            raise ConfigError([Problem(name, f"{name}.{error}")]) from error


def fetch_models(config: DovetailConfig) -> None:
    """Download models named on the hub into its cache, so that a missing one fails before a process starts.

    Workers on other machines fetch for themselves, into the cache of their machine.
    """
    for name, model in named_models(config).items():
        try:
            model_folder(model.path)
        except FileNotFoundError as error:
            key = path_key(name)
            raise ConfigError([Problem(key, f"{key}={model.path}: {error}")]) from error
        if isinstance(model, ModelConfig):
            adapter_folder(model)


def refuse_broken_models(
    config: DovetailConfig, *, on_hub: bool = True, headers_only: bool = True, generates: bool = True
) -> None:
    """Fail here, in one line, instead of in every worker that reads the folder. Those `on_hub` are downloaded.

    Unless `headers_only`, all weights are read once, one tensor at a time. A run that only replays `generates` nothing.
    """
    generates = generates and config.uses_engine and config.actor_rollout_ref.rollout.name == "native"
    read: set[str] = set()
    roles: dict[str, Role] = {"critic.model": "value", "reward_model.model": "reward"}
    if config.trainer.method == "reward":  # trained from either kind; `model=` names both keys
        roles["actor_rollout_ref.model"] = "value"
    policy = config.actor_rollout_ref
    with Refusals() as refused:
        for name, model in _known_models(config).items():
            if not on_hub and is_hub_name(model.path):
                continue
            settings = {"override_config": model.override_config, "trust_remote_code": model.trust_remote_code}
            settings["headers_only"] = headers_only or model.path in read
            read.add(model.path)
            section: Any = getattr(config, name.partition(".")[0])
            strategy = getattr(section, "strategy", None) or policy.actor.strategy
            packs = getattr(model, "use_remove_padding", policy.model.use_remove_padding)
            settings["packs"] = packs and strategy != "megatron"
            if isinstance(model, ModelConfig) and model.uses_lora and strategy != "megatron":
                downloads = model.lora_adapter_path is not None and is_hub_name(model.lora_adapter_path)
                settings["adapted"] = model if on_hub or not downloads else None
            with refused.part():
                network = check_model_folder(model_folder(model.path), roles.get(name, "policy"), **settings)
                if strategy == "megatron":
                    refuse_for_megatron(network.config)
                if name == "actor_rollout_ref.model" and config.replays_routing:
                    refuse_unknown_routers(network)
                if generates and name == "actor_rollout_ref.model":
                    without = "" if config.generates else " Or set sft.val_samples=0 to generate nothing."
                    refuse_for_native_engine(network, advice=without)


def _known_models(config: DovetailConfig) -> dict[str, Any]:
    """Without those whose architecture a module may register that only workers import (`external_lib`)."""
    if config.actor_rollout_ref.model.external_lib is not None:  # workers import it before any role is built
        return {}
    return {name: model for name, model in named_models(config).items() if model.external_lib is None}


def load_readers(config: DovetailConfig) -> tuple[Any, Any | None]:
    """The tokenizer, and the processor of a model that sees images, with the chat template that prompts are put in."""
    model = config.actor_rollout_ref.model
    trust, template = model.trust_remote_code, model.custom_chat_template
    tokenizer = load_tokenizer(config.tokenizer_source, trust_remote_code=trust, chat_template=template)
    processor = load_processor(model.path, trust_remote_code=trust)
    if processor is not None and (template is not None or not processor.chat_template):
        processor.chat_template = tokenizer.chat_template  # some folders have it for the tokenizer alone
    return tokenizer, processor


def try_readers(config: DovetailConfig, refused: Refusals) -> tuple[Any, Any | None]:
    """As `load_readers`; where they cannot be read, a stand-in with which rows and rewards are checked all the same."""
    if config.data.custom_cls.path or config.reward_model.reward_manager_module.path:
        return load_readers(config)  # a class of the user's may ask a tokenizer for anything
    with refused.part():
        return load_readers(config)
    with refused.part():
        why = "without a tokenizer neither the chat template nor the lengths of prompts and responses were checked."
        raise ConfigError([Problem("", why, "warning")])
    return UnreadTokenizer(), None

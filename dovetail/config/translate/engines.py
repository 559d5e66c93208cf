"""Launch lists of verl's `sft_trainer`: the training engine, which is the actor's backend here, and what goes with it.

`engine=megatron` there names a file with defaults, as `optim=` and `model=` do, and `engine.*` are keys of that file.
"""

from __future__ import annotations

from typing import Any

from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.translate.groups import Translated

_ACTOR, _MODEL_PATH = "actor_rollout_ref.actor", "actor_rollout_ref.model.path"
_STRATEGY = f"{_ACTOR}.strategy"
_CHOICES = "hydra.runtime.choices"
"""Where Hydra itself keeps which file was chosen for a section."""
_BACKENDS = {"fsdp": "fsdp", "fsdp2": "fsdp2", "dp": None, "megatron": "megatron"}
"""verl's engines that have a counterpart, and their strategy. `dp` leaves it open."""
_OTHER_ENGINES = ("automodel", "torchtitan", "veomni", "mlite", "mindspeed")
_FILES = {"engine": (*_BACKENDS, *_OTHER_ENGINES), "optim": (*_BACKENDS, *_OTHER_ENGINES), "model": ("hf_model",)}
_PROFILED = "trainer.profile_interval"

SPELLINGS = (
    ("engine=fsdp, fsdp2, megatron", _STRATEGY, "`engine.strategy` is more exact"),
    ("engine.*", f"{_ACTOR}.fsdp_config.*", "with `engine=megatron`: `megatron.*`; then as these keys are read"),
    (f"{_PROFILED}=[3,5]", "global_profiler.steps=[3,4,5]", "[-1,-1]: none"),
)
"""What these rules do, for the documents: written as, read as, why."""


def chosen_file(name: str, value: Any) -> dict[str, Any] | None:
    """The leaf key for `engine=`, `optim=` or `model=` with the name of a file of verl; None for anything else."""
    return {f"{_CHOICES}.{name}": value} if isinstance(value, str) and value in _FILES.get(name, ()) else None


def training_engine(keys: Translated) -> str:
    """Take out which engine was chosen; returns the section that `engine.*` is read as. Goes before every other rule.

    An engine that is not built in is one problem, whatever is set below it.
    """
    for name in ("optim", "model"):
        for value in keys.take(f"{_CHOICES}.{name}").values():
            why = "here every backend has the same keys" if name == "optim" else "write ./hf_model for a folder"
            keys.notice(name, f"{name}={value} chooses a file of verl, which is not read; {why}.")
    chosen = next(iter(keys.take(f"{_CHOICES}.engine").values()), None)
    exact = keys.leaves.get("engine.strategy")
    if chosen is not None and chosen not in _BACKENDS:
        why = "this engine of verl is not built in; use engine=fsdp, fsdp2 or megatron, with its keys"
        keys.problem("engine", f"engine={chosen}: {why}.")
        keys.take(*(key for key in keys.leaves if key.startswith(("engine.", "optim."))))
    elif chosen is not None and exact is not None and (chosen == "megatron") != (exact == "megatron"):
        keys.problem("engine", f"engine={chosen} and engine.strategy={exact} name different backends; keep one.")
        keys.take("engine.strategy")
    elif chosen is not None and (strategy := _BACKENDS[chosen]) is not None and exact is None:
        keys.put(_STRATEGY, strategy, "engine")
        keys.notice("engine", f"engine={chosen} is read as {_STRATEGY}={strategy}.")
    own = set(MegatronConfig.model_fields) - set(FSDPConfig.model_fields) - {"dtype"}  # verl's fsdp has one, too
    is_megatron = "megatron" in (chosen, exact) or (
        chosen is None and any(key.split(".")[1] in own for key in keys.leaves if key.startswith("engine."))
    )
    return f"{_ACTOR}.megatron" if is_megatron else f"{_ACTOR}.fsdp_config"


def profile_interval(keys: Translated) -> None:
    """The first and the last step that are profiled; -1 is none."""
    for interval in keys.take(_PROFILED).values():
        match interval:
            case [int(first), int(last)] if first < 0 and last < 0:
                continue
            case [int(first), int(last)] if 0 < first <= last:
                steps = list(range(first, last + 1))
                keys.put("global_profiler.steps", steps, _PROFILED)
                keys.notice(_PROFILED, f"{_PROFILED}={interval} is read as global_profiler.steps={steps}.")
            case _:
                rule = "two steps, the first not after the last, e.g. [3,5]; [-1,-1] profiles none"
                keys.problem(_PROFILED, f"{_PROFILED}={interval}: give {rule}.")


RULES = (profile_interval,)

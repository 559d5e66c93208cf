"""Launch lists of verl's on-policy distillation: `distillation.*` of `main_ppo` becomes `trainer.method=distill`.

What has no equal is refused with the reason. Without `distillation.enabled=True` the section has no effect.
"""

from __future__ import annotations

from typing import Any

from dovetail.config.translate.groups import Translated, Values
from dovetail.config.wording import name_some

_OLD = "distillation."
ENABLED = f"{_OLD}enabled"
_LOSS, _TEACHERS = f"{_OLD}distillation_loss.", f"{_OLD}teacher_models."
_MODE, _GRADIENT = f"{_LOSS}loss_mode", f"{_LOSS}use_policy_gradient"
_ACTOR = "actor_rollout_ref.actor"
_DEFAULT_ENTRY = "teacher_model"
"""The entry of verl's own file, which it drops where others are named."""

# As a loss of its own, and as a reward of the policy gradient.
_LOSSES = {"k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "forward_kl_topk": "top_k"}
_REWARDS = {"k1": "sampled", "kl": "sampled"}
_SAME = ("loss_max_clamp", "log_prob_min_clamp")
_CLIPS = ("clip_ratio_low", "clip_ratio_high")
_UNREAD = ("clip_ratio", "use_chunked_topk", "chunked_topk_chunk_size")
_NO_ENGINE = "a training backend computes the teacher, split and offloaded as `actor_rollout_ref.ref` says"
_TOP_K = 32
"""verl's default."""

SPELLINGS = (
    (f"{ENABLED}=True", "trainer.method=distill", "the rest of `distillation.*` is read with it alone"),
    (f"{_OLD}nnodes, n_gpus_per_node", "distill.teacher.nnodes, n_gpus_per_node", ""),
    (f"{_TEACHERS}*.model_path", "distill.teacher.path", "of several entries with their `key`: `distill.teachers`"),
    (f"{_OLD}teacher_key", "distill.teacher_key", ""),
    (f"{_MODE}=k1", "distill.kl=sampled", "with `use_policy_gradient=True`"),
    (f"{_MODE}=k2, k3", "distill.kl=k2, k3", "with `use_policy_gradient=False`; mse: k2, low_var_kl: k3"),
    (
        f"{_MODE}=forward_kl_topk",
        "distill.kl=top_k",
        "with `use_policy_gradient=False`; `divergence=forward other_tokens=ignored`",
    ),
    (f"{_LOSS}topk", "distill.top_k", f"{_TOP_K} with forward_kl_topk when it is not set"),
    *((f"{_LOSS}{name}", f"distill.{name}", "") for name in _SAME),
    (f"{_LOSS}use_task_rewards", "distill.reward_coef=1", "False: 0"),
    (f"{_LOSS}distillation_loss_coef", "distill.kl_coef", "with `use_task_rewards=True`"),
    *((f"{_LOSS}{name}", f"{_ACTOR}.{name}", "with `use_policy_gradient=True`") for name in _CLIPS),
)
"""What this rule does, for the documents: written as, read as, why."""


def distillation(keys: Translated) -> None:
    """The whole section."""
    enabled = keys.leaves.get(ENABLED)
    if not isinstance(enabled, bool | None):
        return keys.problem(ENABLED, f"{ENABLED}={enabled}: use true or false.")
    if not enabled:
        return
    given = keys.take(*(key for key in keys.leaves if key.startswith(_OLD)))
    values: Values = {"trainer.method": ("distill", f"{ENABLED}=True, that is trainer.method")}
    for name in ("nnodes", "n_gpus_per_node"):
        values[f"distill.teacher.{name}"] = (given.pop(f"{_OLD}{name}", None), f"{_OLD}{name}")
    entries = {key: given.pop(key) for key in list(given) if key.startswith(_TEACHERS)}
    engines = _teachers(keys, values, entries, given.pop(f"{_OLD}teacher_key", None))
    loss = {key.removeprefix(_LOSS): given.pop(key) for key in list(given) if key.startswith(_LOSS)}
    unread = _loss(keys, values, loss)
    del given[ENABLED]
    for key, value in given.items():
        keys.problem(key, f"{key}={value}: neither dovetail nor verl's distillation has such a key; take it out.")
    keys.put_all(values)
    written = ", ".join(f"{key}={value}" for key, (value, _) in values.items() if value is not None)
    keys.notice(ENABLED, f"{_OLD}* is read as {written}.")
    for names, why in ((engines, _NO_ENGINE), (unread, "this loss does not read it")):
        if names:
            keys.notice(names[0].partition("=")[0], f"{name_some(names)}: no effect here, because {why}.")


def _teachers(keys: Translated, values: Values, entries: dict[str, Any], routed_by: Any) -> list[str]:
    """One teacher, or several by the value of a column. Returns the keys of an engine: the training backend computes a
    teacher here."""
    values["distill.teacher_key"] = (routed_by, f"{_OLD}teacher_key")
    teachers: dict[str, dict[str, Any]] = {}
    unread: list[str] = []
    for key, value in entries.items():
        name, _, field = key.removeprefix(_TEACHERS).partition(".")
        teachers.setdefault(name, {})
        if field in ("key", "model_path"):
            teachers[name][field] = value
        elif field == "num_replicas" or field.startswith("inference."):
            unread.append(f"{key}={value}")
        else:
            keys.problem(key, f"{key}={value}: a teacher has model_path, key, num_replicas and inference.*.")
    if len(teachers) > 1 and (dropped := teachers.pop(_DEFAULT_ENTRY, None)):
        why = f"{_TEACHERS}{_DEFAULT_ENTRY} is left out by verl where other teachers are named, and it is set"
        keys.problem(f"{_TEACHERS}{_DEFAULT_ENTRY}", f"{why}: {dropped}; give this entry another name.")
    for name, teacher in teachers.items():
        for field in ("model_path", *["key"] * (len(teachers) > 1)):
            if field not in teacher:
                keys.problem(f"{_TEACHERS}{name}.{field}", f"{_TEACHERS}{name}.{field} must be set.")
    paths = {str(each.get("key")): each.get("model_path") for each in teachers.values()}
    if len(paths) < len(teachers):
        keys.problem(_TEACHERS, f"{_TEACHERS}*.key: two teachers have the same one; rows could not choose.")
    if len(teachers) > 1:
        values["distill.teachers"] = (paths, f"{_TEACHERS}*")
    else:
        values["distill.teacher.path"] = (next(iter(paths.values()), None), f"{_TEACHERS}*.model_path")
    return unread


def _loss(keys: Translated, values: Values, loss: dict[str, Any]) -> list[str]:
    """What is learned, with verl's defaults for what is not set. Returns the keys that have no effect."""
    mode, by_gradient = loss.pop("loss_mode", "k3"), loss.pop("use_policy_gradient", False)
    task, coef = loss.pop("use_task_rewards", True), loss.pop("distillation_loss_coef", None)
    unread = [f"{_LOSS}{name}={loss.pop(name)}" for name in _UNREAD if name in loss]
    kl = (_REWARDS if by_gradient else _LOSSES).get(str(mode))
    if kl is None:
        keys.problem(_MODE, _why_not(mode, by_gradient=by_gradient))
    values["distill.kl"] = (kl, _MODE)
    if kl == "top_k":
        values["distill.divergence"] = ("forward", _MODE)
        values["distill.other_tokens"] = ("ignored", _MODE)
    default = _TOP_K if kl == "top_k" else None
    values["distill.top_k"] = (loss.pop("topk", default), f"{_LOSS}topk")
    for name in _SAME:
        values[f"distill.{name}"] = (loss.pop(name, None), f"{_LOSS}{name}")
    values["distill.reward_coef"] = (1.0 if task else 0.0, f"{_LOSS}use_task_rewards")
    if task:
        values["distill.kl_coef"] = (coef, f"{_LOSS}distillation_loss_coef")
    elif coef is not None:
        unread.append(f"{_LOSS}distillation_loss_coef={coef}")
    policy_loss = loss.pop("policy_loss_mode", "vanilla")
    if policy_loss != "vanilla":
        keys.problem(f"{_LOSS}policy_loss_mode", f"{_LOSS}policy_loss_mode={policy_loss}: verl has vanilla only.")
    clips = {name: loss.pop(name) for name in _CLIPS if name in loss}
    if by_gradient:
        values[f"{_ACTOR}.policy_loss.loss_mode"] = (policy_loss, f"{_LOSS}policy_loss_mode")
        values |= {f"{_ACTOR}.{name}": (value, f"{_LOSS}{name}") for name, value in clips.items()}
    else:
        unread += [f"{_LOSS}{name}={value}" for name, value in clips.items()]
    for name, value in loss.items():
        keys.problem(f"{_LOSS}{name}", f"{_LOSS}{name}={value}: there is no such key; take it out.")
    return unread


def _why_not(mode: Any, *, by_gradient: bool) -> str:
    if str(mode) in (_LOSSES if by_gradient else _REWARDS):
        why = (
            "as the reward of a token it does not give the gradient of a divergence; set use_policy_gradient=False, or "
            "loss_mode=k1"
            if by_gradient
            else "its gradient does not depend on the teacher; set use_policy_gradient=True"
        )
        return f"{_MODE}={mode} with {_GRADIENT}={by_gradient} is not supported: {why}."
    if mode == "abs":
        return f"{_MODE}=abs is not supported: its gradient is that of no divergence; use k2, k3 or forward_kl_topk."
    return f"{_MODE}={mode} is not known; use one of {', '.join([*_REWARDS, *_LOSSES])}."


RULES = (distillation,)

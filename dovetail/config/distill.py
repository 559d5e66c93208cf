"""`distill.*`: on-policy distillation, the teacher and what is learned from it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from dovetail.config.base import Rule, Section, key, read_with, section, unused, when_not
from dovetail.config.home import HomePath


class TeacherConfig(Section):
    """The model that is imitated. It takes the place of the reference: its sharding is at `actor_rollout_ref.ref`."""

    path: HomePath | None = key(
        None, "Hugging Face folder or hub name of the teacher; it must have the student's tokenizer. Must be set."
    )
    trust_remote_code: bool = key(False, "Run code that comes with the teacher.")
    external_lib: str | None = key(None, "Python module imported before the teacher is built.")
    override_config: dict[str, Any] = key({}, "Fields to change in the teacher's config (free-form).")


class DistillConfig(Section):
    """On-policy distillation: the student samples, the teacher says how likely each token was."""

    rules: ClassVar[tuple[Rule, ...]] = (
        unused("trainer.method=distill reads it (`dovetail distill`)", when_not("trainer.method", "distill")),
    )

    teacher: TeacherConfig = section(TeacherConfig, "The teacher.")
    kl: Literal["sampled", "top_k"] = key(
        "sampled",
        "sampled: the sampled token's log-probs are the signal, an unbiased estimate of the gradient of the reverse "
        "KL. top_k: the reverse KL itself over the teacher's most likely tokens and all others as one.",
    )
    top_k: int = key(64, "Tokens of the teacher that kl=top_k compares.", ge=1, rules=read_with(".kl", "top_k"))
    kl_coef: float = key(1.0, "Weight of the teacher's signal.", ge=0)
    reward_coef: float = key(
        0.0, "Weight of the advantages of the task reward. 0: no reward is computed in training.", ge=0
    )

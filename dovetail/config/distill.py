"""`distill.*`: on-policy distillation, the teacher and what is learned from it."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.config.base import Section, key, read_with, section, unused, when_is
from dovetail.config.home import HomePath


class TeacherConfig(Section):
    """The model that is imitated. It takes the place of the reference: its sharding is at `actor_rollout_ref.ref`."""

    rules = (unused("the teacher shares the student's devices", when_is("nnodes", 0), only="n_gpus_per_node"),)

    path: HomePath | None = key(
        None, "Hugging Face folder or hub name of the teacher; it must have the student's tokenizer. Must be set."
    )
    trust_remote_code: bool = key(False, "Run code that comes with the teacher.")
    external_lib: str | None = key(None, "Python module imported before the teacher is built.")
    override_config: dict[str, Any] = key({}, "Fields to change in the teacher's config.")
    nnodes: int = key(0, "Nodes of the teacher alone; 0: it shares the student's devices.", ge=0)
    n_gpus_per_node: int = key(8, "Devices per such node.", ge=1)

    @property
    def own_devices(self) -> int:
        """Devices that hold nothing but the teacher; 0 when it shares the student's."""
        return self.nnodes * self.n_gpus_per_node


class DistillConfig(Section):
    """On-policy distillation: the student samples, the teacher says how likely each token was."""

    rules = (read_with(".kl", "full", only="divergence"), read_with(".kl", "top_k", only="top_k"))

    teacher: TeacherConfig = section(TeacherConfig)
    kl: Literal["sampled", "top_k", "full"] = key(
        "sampled",
        "sampled: the sampled token's log-probs are the signal, an unbiased estimate of the gradient of the reverse "
        "KL. top_k: the reverse KL itself over the teacher's most likely tokens and all others as one. full: over the "
        "whole vocabulary.",
    )
    divergence: Literal["reverse", "forward", "jsd"] = key(
        "reverse",
        "What kl=full makes small: KL(student, teacher), KL(teacher, student), or the Jensen-Shannon divergence.",
    )
    top_k: int = key(64, "Tokens of the teacher that kl=top_k compares.", ge=1)
    kl_coef: float = key(1.0, "Weight of the teacher's signal.", ge=0)
    reward_coef: float = key(0.0, "Weight of the advantages of the task reward. 0: it is not computed.", ge=0)

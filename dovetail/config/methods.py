"""`sft.*`, `dpo.*`, `reward_training.*`, `distill.*`: what only these methods have. Model, optimizer and batches have
their own sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from dovetail.config.base import HomePath, Section, key, read_with, section, unused, when_is
from dovetail.config.tree import leaves


class SFTConfig(Section):
    """Columns of the conversations of `trainer.method=sft`, and samples of validation."""

    rules = (unused("validation generates no answer", when_is("num_val_samples", 0), only="val_sample_tokens"),)

    messages_key: str = key("messages", "Column that holds a list of messages.", min_length=1)
    tools_key: str = key("tools", "Column that holds the tools of a conversation, a list or JSON.", min_length=1)
    response_key: str = key(
        "response",
        "Column that holds the answer to `data.prompt_key`, in rows without messages: text or messages.",
        min_length=1,
    )
    enable_thinking_key: str = key(
        "enable_thinking",
        "Column that says whether the chat template lets the model think in this conversation; null where it is open.",
        min_length=1,
    )
    enable_thinking_default: bool | None = key(
        None,
        "The same for rows without that column. Null: what `data.apply_chat_template_kwargs` or the template says.",
        reads={"none": None},
    )
    val_samples: int | None = key(
        None,
        "Conversations of `data.val_files` whose first answer is generated at each validation, for people to read. "
        "Null: 4 where the embedded engine reads the trained weights in place (one process, no adapters, no Megatron), "
        "else none.",
        ge=0,
    )
    val_sample_tokens: int = key(128, "Longest such answer, in tokens.", ge=1)
    prompt_dict_keys: list[str] = key([], "Keys inside the prompt's column, where it holds a dict.")
    response_dict_keys: list[str] = key([], "Keys inside the response's column, where it holds a dict.")


class DPOConfig(Section):
    """The loss of `dovetail dpo`."""

    rules = (
        read_with(".loss_type", "kto", only="desirable_weight undesirable_weight"),
        read_with(".loss_type", "simpo", only="simpo_gamma"),
        read_with(".loss_type", "sigmoid", "simpo", only="label_smoothing"),
    )

    loss_type: Literal["sigmoid", "ipo", "kto", "orpo", "simpo"] = key(
        "sigmoid", "sigmoid is DPO itself. orpo and simpo need no reference; kto also takes rows with one label each."
    )
    beta: float = key(
        0.1,
        "How closely the policy is held to the reference; with simpo the scale of rewards, with orpo the weight "
        "of the odds ratio.",
        gt=0,
    )
    label_smoothing: float = key(0.0, "Share of pairs taken to be labelled the wrong way round.", ge=0, lt=0.5)
    simpo_gamma: float = key(0.5, "By how much the chosen reward should be above the rejected one.", ge=0)
    desirable_weight: float = key(1.0, "Weight of good responses.", gt=0)
    undesirable_weight: float = key(1.0, "Weight of bad responses.", gt=0)


class RewardTrainingConfig(Section):
    """The loss of `dovetail reward`."""

    center_coefficient: float = key(
        0.0, "Weight of the squared sum of a pair's scores, which keeps them around 0.", ge=0
    )


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


def _with_dotted_names(teachers: Any) -> Any:
    """`{"geo": {"3k": path}}` as `{"geo.3k": path}`: a file or an override cuts a name at its dots."""
    return dict(leaves(teachers)) if isinstance(teachers, dict) else teachers


class DistillConfig(Section):
    """On-policy distillation: the student samples, the teacher says how likely each token was."""

    rules = (
        read_with(".kl", "top_k", "full", only="divergence log_prob_min_clamp"),
        read_with(".kl", "top_k", only="top_k other_tokens"),
        unused("one teacher scores all rows", when_is("teachers", {}), only="teacher_key"),
    )

    teacher: TeacherConfig = section(TeacherConfig)
    teachers: Annotated[dict[str, HomePath], BeforeValidator(_with_dotted_names)] = key(
        {},
        "Several teachers, in place of `distill.teacher.path`: the folder or hub name of each, by the value that its "
        "rows have in the column `distill.teacher_key`. What else is in `distill.teacher` holds for all of them.",
    )
    teacher_key: str = key("data_source", "Column of the rows that chooses between `distill.teachers`.", min_length=1)
    kl: Literal["sampled", "k2", "k3", "top_k", "full"] = key(
        "sampled",
        "sampled: the sampled token's log-probs are its advantage, an unbiased estimate of the gradient of the reverse "
        "KL. k2, k3: an estimate of the KL from the same log-probs as a loss. top_k: a divergence itself over the "
        "teacher's most likely tokens. full: over the whole vocabulary.",
    )
    divergence: Literal["reverse", "forward", "jsd"] = key(
        "reverse",
        "What kl=top_k and kl=full make small: KL(student, teacher), KL(teacher, student), or the Jensen-Shannon "
        "divergence.",
    )
    top_k: int = key(64, "Tokens of the teacher that kl=top_k compares.", ge=1)
    other_tokens: Literal["as_one", "ignored"] = key(
        "as_one",
        "All tokens that kl=top_k does not list: one more event, or not counted, which only divergence=forward allows.",
    )
    log_prob_min_clamp: float | None = key(
        None, "Log-probs of both models below it count as it in a divergence; null: no bound.", lt=0
    )
    loss_max_clamp: float | None = key(
        None, "Bound on what one token adds to the loss, or on its advantage; null: no bound.", gt=0
    )
    kl_coef: float = key(1.0, "Weight of the teacher's signal.", ge=0)
    reward_coef: float = key(0.0, "Weight of the advantages of the task reward. 0: it is not computed.", ge=0)

    @property
    def teacher_paths(self) -> dict[str, str]:
        """Folders by the value that chooses them; the one teacher of all rows has no name."""
        return dict(self.teachers) or {"": self.teacher.path or ""}

    @property
    def is_estimate(self) -> bool:
        """Whether an estimate from the sampled tokens' log-probs is a loss."""
        return self.kl in ("k2", "k3")

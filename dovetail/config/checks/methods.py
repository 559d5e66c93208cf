"""Methods other than RL: what distillation needs and excludes, how rows of a data set are read, rates meant for RL."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings

# Of full weights; a policy gradient needs far smaller steps than cross-entropy.
_LOW_SFT_LR = 2e-6


def _rows(run: Examined) -> Findings:
    data = run.config.data
    if data.custom_cls.path is not None:
        yield run.error(
            "<data.custom_cls.path> makes prompts for generation, which <trainer.method> does not read; write the rows "
            "to a file."
        )
    if data.truncation == "middle":
        yield run.error(
            "<data.truncation> cuts a piece out of a prompt, and with <trainer.method> what is trained may be in it; "
            "use error, left or right."
        )
    if 0 <= data.train_max_samples < data.train_batch_size:
        yield run.error(
            "<data.train_max_samples> is less than <data.train_batch_size>, so a run has no step at all; use "
            f"{data.train_batch_size} or more, or -1."
        )


def _rates(run: Examined) -> Findings:
    lr = run.config.actor_rollout_ref.actor.optim.lr
    if run.config.trainer.method == "sft" and 0 < lr < _LOW_SFT_LR:
        yield run.warning(f"@actor.optim.lr={lr:g} is a rate for RL; fine-tuning starts at 1e-5 or so.")


def _distillation(run: Examined) -> Findings:
    config = run.config
    if not config.distills:
        return
    if not config.distill.teacher.path:
        yield run.error("<trainer.method> needs a teacher and @distill.teacher.path is not set; give its folder.")
    for key, on in (
        ("actor.use_kl_loss", config.actor_rollout_ref.actor.use_kl_loss),
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
    ):
        if on:
            yield run.error(
                f"<{key}> punishes the KL to a reference, and with <trainer.method> the teacher is in its place; set "
                f"@{key}=False."
            )
    if config.algorithm.filter_groups.enable:
        yield run.error(
            "<algorithm.filter_groups.enable> drops groups by their reward, and <trainer.method> learns from every "
            "token; set algorithm.filter_groups.enable=False."
        )
    if config.async_training.mode != "off":
        yield run.error("<async_training.mode> cannot be combined with <trainer.method>; use async_training.mode=off.")
    if config.distill.kl_coef == 0:
        yield run.warning("<distill.kl_coef> learns nothing from the teacher; use 1.0, or `dovetail train`.")


OFFLINE: tuple[Check, ...] = (_rows, _rates)
DISTILL: tuple[Check, ...] = (_distillation,)

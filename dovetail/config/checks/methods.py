"""Methods other than RL: what distillation needs and excludes, how rows of a data set are read, rates meant for RL."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings

# Of full weights; a policy gradient needs far smaller steps than cross-entropy.
_LOW_SFT_LR = 2e-6


def _rows(run: Examined) -> Findings:
    data = run.data
    if data.custom_cls.path is not None:
        yield run.error("<data.custom_cls.path> makes prompts; <trainer.method> reads rows: write them to a file.")
    if data.truncation == "middle":
        yield run.error(
            "<data.truncation> cuts a piece out of a prompt, and with <trainer.method> what is trained may be in it; "
            "use error, left or right."
        )
    if 0 <= data.train_max_samples < data.train_batch_size:
        yield run.error("<data.train_max_samples> is below <data.train_batch_size>: no step at all; use more, or -1.")


def _rates(run: Examined) -> Findings:
    lr = run.actor.optim.lr
    if run.trainer.method == "sft" and 0 < lr < _LOW_SFT_LR:
        yield run.warning(f"@actor.optim.lr={lr:g} is a rate for RL; fine-tuning starts at 1e-5 or so.")


def _distillation(run: Examined) -> Findings:
    config = run.config
    if not config.distills:
        return
    if not config.distill.teacher.path and not config.distill.teachers:
        yield run.error("<trainer.method> needs a teacher and @distill.teacher.path is not set; give its folder.")
    if config.distill.teacher.path and config.distill.teachers:
        yield run.error(
            "<distill.teacher.path> scores all rows, <distill.teachers> those that choose them; keep one of the two."
        )
    if config.distill.teachers and config.distill.kl == "full":
        yield run.error(
            "<distill.kl> compares with the output layer of one teacher, and there are several in @distill.teachers; "
            "use @distill.kl=top_k with a large @distill.top_k."
        )
    for key, off, why in (
        ("actor.use_kl_loss", False, "punishes the KL to a reference, and the teacher is in its place"),
        ("algorithm.use_kl_in_reward", False, "punishes the KL to a reference, and the teacher is in its place"),
        ("algorithm.filter_groups.enable", False, "drops groups by reward, and a student learns from every token"),
        ("async_training.mode", "off", "cannot be combined with it"),
    ):
        if run.value(key) != off:
            yield run.error(f"<{key}> with <trainer.method> {why}; use @{key}={off}.")
    if (config.distill.kl, config.distill.other_tokens) == (
        "top_k",
        "ignored",
    ) and config.distill.divergence != "forward":
        yield run.error(
            "<distill.other_tokens> with <distill.divergence> is made small by moving probability out of the list; use "
            "@distill.divergence=forward, or @distill.other_tokens=as_one."
        )
    if config.distill.kl_coef == 0:
        yield run.warning("<distill.kl_coef> learns nothing from the teacher; use 1.0, or `dovetail train`.")


OFFLINE: tuple[Check, ...] = (_rows, _rates)
DISTILL: tuple[Check, ...] = (_distillation,)

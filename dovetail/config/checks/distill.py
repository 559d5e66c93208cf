"""What distillation needs, and what it cannot be combined with."""

from __future__ import annotations

from dovetail.config.checks.examined import Check, Examined, Findings


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


DISTILL: tuple[Check, ...] = (_distillation,)

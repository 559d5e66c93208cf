"""Training on a data set: what its rows are read by, and rates that are meant for RL."""

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


OFFLINE: tuple[Check, ...] = (_rows, _rates)

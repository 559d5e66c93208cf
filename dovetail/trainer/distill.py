"""`trainer.method=distill`: on-policy distillation. The PPO loop with a teacher where the reference is.

The teacher's log-probs of the student's tokens become advantages (`distill.kl=sampled`), or the update has a loss from
what the teacher says (`workers/teacher_loss.py`). The advantages of a task reward are added with `reward_coef`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import torch

from dovetail.algorithms.distillation import clamp_signal, distillation_advantages
from dovetail.config import ConfigError
from dovetail.config.errors import Problem
from dovetail.config.root import DovetailConfig
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.rewards.runner import PendingRewards, RewardResult
from dovetail.trainer.base import Metrics
from dovetail.trainer.method import RunOptions
from dovetail.trainer.ppo import RayPPOTrainer
from dovetail.trainer.rl import RLMethod


class DistillTrainer(RayPPOTrainer):
    """Needs `groups.ref` to be the teacher. Without `distill.reward_coef` training responses are not scored."""

    def _start_rewards(
        self, batch: DataProto, *, shaped: bool = True, started: list[Future[Any]] | None = None
    ) -> PendingRewards | RewardResult:
        if self.config.scores_training or not shaped:  # validation is scored in any case
            return super()._start_rewards(batch, shaped=shaped, started=started)
        columns = {
            "token_level_scores": torch.zeros(batch.tensors["responses"].shape),
            "reward_failed": torch.zeros(len(batch), dtype=torch.bool),
        }
        return RewardResult(DataProto.from_dict(columns), metrics={}, failures={})

    def _add_advantages(self, batch: DataProto, metrics: Metrics) -> DataProto:
        settings = self.config.distill
        batch = super()._add_advantages(batch, metrics)
        columns = batch.tensors
        advantages = settings.reward_coef * columns["advantages"]
        if settings.kl == "sampled":
            mask = columns["response_mask"]
            signal = distillation_advantages(columns["old_log_probs"], columns["ref_log_prob"], mask)
            # The mean over tokens of the student estimates the reverse KL per token.
            metrics["distill/kl"] = float(-signal.sum() / mask.sum().clamp(min=1))
            advantages = advantages + settings.kl_coef * clamp_signal(signal, settings.loss_max_clamp)
        return DataProto.from_dict({**columns, "advantages": advantages}, batch.non_tensor_batch, batch.meta_info)


class DistillMethod(RLMethod):
    """Prompts and a teacher; rewards for validation, and for training where they are asked for."""

    def __init__(self, config: DovetailConfig, options: RunOptions, open_things: ExitStack) -> None:
        super().__init__(config, options, open_things)
        teacher = config.distill.teacher
        assert teacher.path is not None, "the checks ask for it"
        theirs = load_tokenizer(teacher.path, trust_remote_code=teacher.trust_remote_code)
        refuse_other_vocabulary(self._tokenizer.get_vocab(), theirs.get_vocab(), config)

    @property
    def _trainer_class(self) -> type[RayPPOTrainer]:
        return DistillTrainer


def refuse_other_vocabulary(own: Mapping[str, int], theirs: Mapping[str, int], config: DovetailConfig) -> None:
    """Token ids must mean the same to both: the teacher reads the student's tokens, not its text."""
    different = sorted(own.items() ^ theirs.items(), key=lambda entry: entry[1])
    if not different:
        return
    token = different[0][0]
    policy = config.actor_rollout_ref.model.path
    why = (
        f"distill.teacher.path={config.distill.teacher.path} and actor_rollout_ref.model.path={policy} have different "
        f"tokenizers: token {token!r} has {_number(theirs, token)} in the teacher's and {_number(own, token)} in the "
        f"student's ({len(different)} entries differ). The teacher scores token ids of the student; use two models of "
        "one family."
    )
    raise ConfigError([Problem("distill.teacher.path", why)])


def _number(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no id"

"""A real check that engine and trainer agree: load, train one step, sync, generate, compare log-probs.

Runs the same groups and calls as a training run, on a handful of tokens. Writes no file and keeps no weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerGroup
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.trainer.arrange import arrange_rows
from dovetail.trainer.groups import RoleGroups
from dovetail.workers.parity import PASS_MARKS, PROMPTS, LogProbDiff, ParityReport, PassMark, coarser_dtype

NUM_SAMPLES = 2
NUM_PROMPTS = len(PROMPTS)
NUM_TOKENS = 24
OVERRIDES = (
    # One small batch is one optimizer step; roles that have no part in the question are left out.
    f"data.train_batch_size={NUM_PROMPTS}",
    "data.max_prompt_length=64",
    f"data.max_response_length={NUM_TOKENS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.use_dynamic_bsz=False",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "actor_rollout_ref.actor.use_kl_loss=False",
    f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
    # Large enough that an engine which missed the step is far outside the pass mark.
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    # The check below says more than an error at the start would.
    "actor_rollout_ref.rollout.verify_start=False",
    "actor_rollout_ref.rollout.verify_weights=False",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "reward_model.enable=False",
)
"""What the check changes in a configuration."""


@dataclass(frozen=True)
class Stage:
    """One step of the check."""

    name: str
    seconds: float
    outcome: str
    passed: bool = True


@dataclass(frozen=True)
class LogProbDiffs:
    """Log-probs of sampled tokens in the engine and in the trainer, and how far the training step moved them."""

    diffs: Tensor
    moved: float
    mark: PassMark

    @property
    def mean(self) -> float:
        return float(self.diffs.mean())

    @property
    def largest(self) -> float:
        return float(self.diffs.max())

    @property
    def passed(self) -> bool:
        return bool(self.diffs.isfinite().all()) and self.mean <= self.mark.mean and self.largest <= self.mark.largest

    @property
    def tells(self) -> bool:
        """Whether an engine with old weights would have been found out: it would be off by what the step moved.

        Either that fails the mark, or the engine is off by far less. Steps of adapters are small beside the mark of
        bfloat16.
        """
        return self.moved > min(2 * self.mark.mean, 4 * self.mean)

    def decades(self) -> list[tuple[int | None, int]]:
        """How many tokens lie in each power of ten; None counts those that are equal."""
        diffs = self.diffs[self.diffs.isfinite()].tolist()
        powers = [math.floor(math.log10(diff)) for diff in diffs if diff > 0]
        counts = [(power, powers.count(power)) for power in range(min(powers), max(powers) + 1)] if powers else []
        return [(None, len(diffs) - len(powers)), *counts]


@dataclass(frozen=True)
class Examination:
    """What the check found. `before` and `after` are greedy answers around the training step, one report per rank."""

    stages: tuple[Stage, ...]
    before: ParityReport
    after: ParityReport
    sampled: LogProbDiffs
    worst: tuple[tuple[str, LogProbDiff], ...]
    """The tokens with the largest differences, with their text."""

    @property
    def passed(self) -> bool:
        return self.before.passed and self.after.passed and self.sampled.passed and self.sampled.tells


def examine(
    config: DovetailConfig, groups: RoleGroups, *, on_stage: Callable[[str], None] = lambda name: None
) -> Examination:
    """Run the check on groups that were created from `config`, which has `OVERRIDES` in it."""
    policy = groups.actor_rollout
    clock = _Clock(on_stage)
    mark = PASS_MARKS[coarser_dtype(config)]

    with clock("load the model and start the engine"):
        groups.init_policy(1)
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.tokenizer_source)
    with clock("sync, generate, compare"):
        before = _worst(groups.rollout.check_parity())
    clock.judge(before.passed, _diff_words(before.mean_abs_diff, len(before.tokens)))
    with clock("train one step"):
        old, old_log_probs = _answers(groups, tokenizer)
        moved = _train(policy, old, old_log_probs)
        groups.weights_changed(1)
    num_tokens = int(old.tensors["response_mask"].sum())
    clock.judge(True, f"log-probs of {num_tokens} tokens moved by {moved:.2g} on average")
    with clock("sync again, generate, compare"):
        after = _worst(groups.rollout.check_parity())
    clock.judge(after.passed, _diff_words(after.mean_abs_diff, len(after.tokens)))
    with clock("sample answers, compare"):
        new, log_probs = _answers(groups, tokenizer)
        kept = new.tensors["response_mask"].bool()
        sampled = LogProbDiffs((new.tensors["rollout_log_probs"] - log_probs).abs()[kept], moved, mark)
    clock.judge(sampled.passed, _diff_words(sampled.mean, sampled.diffs.numel()))
    return Examination(tuple(clock.stages), before, after, sampled, _worst_tokens(new, log_probs, tokenizer))


def _answers(groups: RoleGroups, tokenizer: Any) -> tuple[DataProto, Tensor]:
    """Sampled answers and the trainer's log-probs of them."""
    ids = np.empty(NUM_PROMPTS, dtype=object)
    ids[:] = [tokenizer.encode(text, add_special_tokens=False)[:64] for text in PROMPTS]
    prompts = DataProto.from_dict(
        {"index": torch.arange(NUM_PROMPTS)},
        {"raw_prompt_ids": ids, "sampling_seed": np.arange(NUM_PROMPTS)},
        {"n": NUM_SAMPLES},
    )
    batch = groups.rollout.generate_sequences(prompts)
    return batch, groups.actor_rollout.compute_log_prob(batch).tensors["old_log_probs"]


def _train(policy: WorkerGroup, batch: DataProto, old_log_probs: Tensor) -> float:
    """One update that likes the first answer to each prompt; how far it moved the log-probs, on average."""
    mask = batch.tensors["response_mask"]
    liked = torch.tensor([1.0, -1.0]).repeat(NUM_PROMPTS)[:, None]
    train_once(policy, batch, old_log_probs, liked * mask)
    new = policy.compute_log_prob(batch).tensors["old_log_probs"]
    return float((new - old_log_probs).abs()[mask.bool()].mean())


def train_once(policy: WorkerGroup, batch: DataProto, old_log_probs: Tensor, advantages: Tensor) -> dict[str, Any]:
    """One update with all rows; its metrics."""
    columns = {**batch.tensors, "old_log_probs": old_log_probs, "advantages": advantages}
    facts = {"temperature": batch.meta_info["temperature"]}
    update_batch = DataProto.from_dict(columns, dict(batch.non_tensor_batch), facts)
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    update_batch.reorder(arrange_rows(lengths, policy.dp_size("actor"), len(batch)))
    return policy.update_actor(update_batch).meta_info["metrics"]


def _worst(reports: list[ParityReport]) -> ParityReport:
    return max(reports, key=lambda report: (not report.passed, report.mean_abs_diff))


def _worst_tokens(batch: DataProto, log_probs: Tensor, tokenizer: Any) -> tuple[tuple[str, LogProbDiff], ...]:
    columns = batch.tensors
    diffs = ((columns["rollout_log_probs"] - log_probs).abs() * columns["response_mask"]).flatten()
    width = log_probs.shape[1]
    worst = []
    for flat in diffs.topk(min(3, diffs.numel())).indices.tolist():
        row, position = divmod(flat, width)
        token = int(columns["responses"][row, position])
        engine, trainer = float(columns["rollout_log_probs"][row, position]), float(log_probs[row, position])
        worst.append((tokenizer.decode([token]), LogProbDiff(row // NUM_SAMPLES, position, token, engine, trainer)))
    return tuple(worst)


def _diff_words(diff: float, count: int) -> str:
    return f"log-probs of {count} tokens within {diff:.2g} on average"


class _Clock:
    """Times the stages; what came out of each is said after it."""

    def __init__(self, on_stage: Callable[[str], None]) -> None:
        self.stages: list[Stage] = []
        self._on_stage = on_stage

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._on_stage(name)
        started = time.perf_counter()
        yield
        self.stages.append(Stage(name, time.perf_counter() - started, ""))

    def judge(self, passed: bool, words: str) -> None:
        self.stages[-1] = replace(self.stages[-1], outcome=words, passed=passed)

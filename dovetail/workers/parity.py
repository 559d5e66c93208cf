"""Compare engine and trainer: a few prompts, the engine's greedy responses, the trainer's forward pass over them.

Makes the requests and compares the results. Which processes hold engine and model is up to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.config.fsdp import full_dtype
from dovetail.config.root import DovetailConfig
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import assemble
from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine, SamplingParams

PROMPTS = ("The capital of France is", "12 + 7 =", "def add(a, b):", "Once upon a time, in a small village by the sea,")
NUM_TOKENS = 8
MAX_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class PassMark:
    """Largest difference of log-probs (nats) that rounding explains: on average, and on any one token."""

    mean: float
    largest: float


# Measured between engines and a plain forward: float32 5e-6 on average and 5e-5 at most; bfloat16 0.04 and 0.4. A
# layer with old weights is off by tenths on average. Routers of experts may turn over on single bfloat16 tokens. With
# products in fp8 a model of 0.5B differs by 0.08 and 0.3, one of 135M by 0.15 and 0.6.
PASS_MARKS: Mapping[str, PassMark] = {
    "float32": PassMark(1e-4, 1e-3),
    "float16": PassMark(0.03, 0.5),
    "bfloat16": PassMark(0.2, 3.0),
    "float8_e4m3fn": PassMark(0.5, 4.0),
}


class ParityError(RuntimeError):
    """Engine and trainer disagree by more than rounding explains. The message names the token."""


@dataclass(frozen=True)
class LogProbDiff:
    """One token the engine wrote: its log-prob there, in the trainer, and of the trainer's most likely token."""

    prompt: int
    position: int
    token_id: int
    engine: float
    trainer: float
    best: float | None = None

    @property
    def diff(self) -> float:
        return abs(self.engine - self.trainer)

    @property
    def regret(self) -> float:
        """Log-prob of the trainer's most likely token, less that of the token the engine chose greedily."""
        return 0.0 if self.best is None else self.best - self.trainer


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison. `dtype` is the coarser one of the two computations."""

    dtype: str
    mark: PassMark
    tokens: tuple[LogProbDiff, ...]

    @property
    def mean_abs_diff(self) -> float:
        return sum(token.diff for token in self.tokens) / max(1, len(self.tokens))

    @property
    def worst(self) -> LogProbDiff:
        """The token with the largest log-prob difference or regret."""
        return max(self.tokens, key=lambda token: max(token.diff, token.regret))

    @property
    def passed(self) -> bool:
        worst = self.worst
        finite = all(token.diff == token.diff for token in self.tokens)
        return finite and self.mean_abs_diff <= self.mark.mean and max(worst.diff, worst.regret) <= self.mark.largest

    def explain(self, engine: str) -> str:
        """The verdict in words: the token, both numbers, the mark, and what to try."""
        worst = self.worst
        choice = ""
        if worst.regret > self.mark.largest:
            choice = f" The trainer likes another token better by {worst.regret:.3g}."
        return (
            f"the {engine} engine and the trainer disagree: log-probs differ by {self.mean_abs_diff:.3g} on average "
            f"over {len(self.tokens)} greedy tokens (pass mark for {self.dtype}: {self.mark.mean:g}), most at token "
            f"{worst.position} of probe prompt {worst.prompt} (id {worst.token_id}): {worst.engine:.5f} in the engine, "
            f"{worst.trainer:.5f} in the trainer (pass mark {self.mark.largest:g}).{choice} Run `dovetail doctor` "
            "with this configuration; try actor_rollout_ref.rollout.dtype=float32 and "
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 to tell rounding from wrong "
            "weights, and actor_rollout_ref.rollout.name=native to tell the engine from the model."
        )

    def require(self, engine: str) -> None:
        if not self.passed:
            raise ParityError(self.explain(engine))


class ParityProbe:
    """The questions, and how answers are laid out for a forward. The same in every process of a run."""

    def __init__(self, config: DovetailConfig, tokenizer: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        room = min(MAX_PROMPT_TOKENS, rollout.prompt_length)
        self.prompts = [tokenizer.encode(text, add_special_tokens=False)[:room] for text in PROMPTS]
        self.dtype = coarser_dtype(config)
        self._num_tokens = min(NUM_TOKENS, rollout.response_length)
        self._pad_token_id = int(tokenizer.pad_token_id)

    def ask(self, engine: RolloutEngine, name: str = "parity") -> list[GenerationResult]:
        """The engine's greedy answers."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self._num_tokens, ignore_eos=True)
        return engine.generate(
            [GenerationRequest(f"{name}-{n}", prompt, sampling) for n, prompt in enumerate(self.prompts)]
        )

    def batch(self, answers: Sequence[GenerationResult]) -> DataProto:
        """Prompts and answers as a model reads them; responses are the last columns."""
        return assemble(self.prompts, answers, pad_token_id=self._pad_token_id, response_length=self._num_tokens)

    def judge(self, answers: Sequence[GenerationResult], log_probs: Tensor, best: Tensor | None) -> ParityReport:
        """Hold the answers against the trainer's numbers, `[prompt, response token]`."""
        tokens = [
            LogProbDiff(
                prompt,
                position,
                answer.token_ids[position],
                answer.log_probs[position],
                float(log_probs[prompt, position]),
                None if best is None else float(best[prompt, position]),
            )
            for prompt, answer in enumerate(answers)
            for position in range(len(answer.token_ids))
        ]
        return ParityReport(self.dtype, PASS_MARKS[self.dtype], tuple(tokens))


def coarser_dtype(config: DovetailConfig) -> str:
    """The dtype with the larger rounding of engine and trainer: what their agreement can be held to."""
    policy = config.actor_rollout_ref
    names = {full_dtype(policy.rollout.dtype), full_dtype(policy.actor.compute_dtype)}
    # float32 products may be made of bfloat16 ("medium") or of TF32 ("high"), which has the digits of float16.
    precision = config.trainer.float32_matmul_precision
    names.add({"medium": "bfloat16", "high": "float16"}.get(precision, "float32"))
    if policy.actor.fp8_recipe is not None or policy.rollout.quantization is not None:
        names.add("float8_e4m3fn")
    return max(names, key=lambda name: torch.finfo(getattr(torch, name)).eps)

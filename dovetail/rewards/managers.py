"""Reward managers: how rows become calls of the reward function, and what happens to the scores afterwards.

`naive` (and `prime`) score row by row; `batch` gives the function all rows at once; `dapo` also punishes long answers.
A manager runs in the driver and must not block: the functions themselves run in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dovetail.algorithms import compute_overlong_penalty
from dovetail.config.wording import did_you_mean
from dovetail.protocol import DataProto
from dovetail.rewards.answers import Answer, Decoder, read_answers
from dovetail.rewards.errors import Failure

Outcome = dict[str, Any] | Failure
"""What is known of a row: `{"score": ..., further columns}`, or why there is no score."""

_MANAGERS: dict[str, type[RewardManager]] = {}
_Manager = TypeVar("_Manager", bound="type[RewardManager]")


def register_reward_manager(*names: str) -> Callable[[_Manager], _Manager]:
    """Decorator: make a manager known as `reward_model.reward_manager=<name>`."""

    def decorate(manager: _Manager) -> _Manager:
        for name in names:
            if name in _MANAGERS and _MANAGERS[name] is not manager:
                raise ValueError(f"reward manager {name!r} is already {_MANAGERS[name]}; choose another name.")
            _MANAGERS[name] = manager
        return manager

    return decorate


def find_reward_manager(name: str) -> type[RewardManager]:
    if name in _MANAGERS:
        return _MANAGERS[name]
    raise ValueError(
        f"reward_model.reward_manager={name} is not known.{did_you_mean(name, _MANAGERS)} "
        f"There are {', '.join(sorted(_MANAGERS))}; reward_model.reward_manager_module.path names a file with your own."
    )


class RewardManager:
    """Base of all managers. A user's manager inherits from one of them and changes what it wants to."""

    scores_whole_batch: bool = False

    def read(self, batch: DataProto, tokenizer: Decoder, reward_fn_key: str) -> list[Answer]:
        """The rows of a batch as answers."""
        return read_answers(batch, tokenizer, reward_fn_key=reward_fn_key)

    def prepare(self, answer: Answer) -> dict[str, Any]:
        """The arguments of the reward function for one row; they cross a process boundary."""
        return answer.arguments(answer.solution_str)

    def shape(self, answers: Sequence[Answer], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Change scores once all are known. Failures must stay failures."""
        return list(outcomes)


@register_reward_manager("naive", "prime")
class NaiveRewardManager(RewardManager):
    """One call per row."""


@register_reward_manager("batch")
class BatchRewardManager(RewardManager):
    """One call with all rows: `(data_sources, solution_strs, ground_truths, extra_infos)` to a list."""

    scores_whole_batch = True


@register_reward_manager("rate_limited")
class RateLimitedRewardManager(RewardManager):
    """Row by row, no faster than `reward_model.max_concurrent`, `max_rpm` and `max_tpm` allow: for judges behind an
    API. The dispatcher of the scoring processes keeps the limits.
    """


@register_reward_manager("dapo")
class DAPORewardManager(RewardManager):
    """Row by row, then the soft punishment of answers that run into the last `overlong_buffer_len` tokens."""

    def __init__(
        self,
        *,
        max_response_length: int = 0,
        overlong_buffer_len: int = 0,
        overlong_penalty_factor: float = 1.0,
        log_overlong: bool = False,
    ) -> None:
        self._max_response_length = max_response_length
        self._buffer = overlong_buffer_len
        self._factor = overlong_penalty_factor
        self._log = log_overlong

    def shape(self, answers: Sequence[Answer], outcomes: Sequence[Outcome]) -> list[Outcome]:
        if not self._buffer:
            return list(outcomes)
        lengths = torch.tensor([answer.response_length for answer in answers])
        penalties = compute_overlong_penalty(lengths, self._max_response_length, self._buffer, self._factor).tolist()
        return [self._punished(outcome, penalty) for outcome, penalty in zip(outcomes, penalties, strict=True)]

    def _punished(self, outcome: Outcome, penalty: float) -> Outcome:
        if isinstance(outcome, Failure):
            return outcome
        # The punishment is for training; `acc` (or the bare score) still says whether the answer was right.
        shaped = {**outcome, "score": outcome["score"] + penalty, "acc": outcome.get("acc", outcome["score"])}
        return {**shaped, "overlong_reward": penalty, "overlong": penalty < 0} if self._log else shaped

"""`RewardRunner`: scores a batch in the background, while the driver computes log-probs. See `docs/rewards.md`.

What cannot be scored is marked in `reward_failed` and counted; above a share of failures `result` raises. The trainer
takes marked rows out by zeroing their `response_mask`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any, Self

from dovetail.protocol import DataProto
from dovetail.protocol.trajectories import Trajectories, trajectories_of
from dovetail.rewards.answers import Answer, Decoder, last_response_token
from dovetail.rewards.columns import (
    FAILED,
    add_model_scores,
    check_failures,
    failure_message,
    outcome_columns,
    place_scores,
    reward_metrics,
    score_batch,
)
from dovetail.rewards.decoding import TEXT, decoder_source
from dovetail.rewards.dispatch import RateLimits, ScoringDispatcher
from dovetail.rewards.errors import Failure, RewardError
from dovetail.rewards.functions import ARGUMENTS, BATCH_ARGUMENTS, FunctionSpec
from dovetail.rewards.managers import NaiveRewardManager, Outcome, RewardManager
from dovetail.rewards.nodes import start_node_pools
from dovetail.rewards.pool import KillablePool
from dovetail.rewards.registry import check_sources, default_compute_score
from dovetail.rewards.trajectories import add_turn_rewards, known_outcomes, on_rows, shared

logger = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.2
_MEANWHILE_S = 0.2


@dataclass(frozen=True)
class RewardResult:
    """`columns` has token_level_scores, reward_failed and what the functions returned; unite it with the batch."""

    columns: DataProto
    metrics: dict[str, float]
    failures: dict[int, Failure]
    answers: Sequence[Answer] = ()

    @property
    def solution_strs(self) -> list[str]:
        """The answers as text. Scoring processes have sent theirs; the rest is decoded here."""
        return [answer.solution_str for answer in self.answers]


class RewardRunner:
    """Owns the scoring processes. Close it, or use it in a `with` block.

    Without `specs` only reward-model scores count. `rule_weight` and `rm_weight` matter when both are there.
    """

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        tokenizer: Decoder,
        *,
        manager: RewardManager | None = None,
        num_workers: int = 1,
        timeout_seconds: float = 300.0,
        max_failed_share: float = MAX_FAILED_SHARE,
        rule_weight: float = 1.0,
        rm_weight: float = 1.0,
        reward_fn_key: str = "data_source",
        import_modules: Sequence[str] = (),
        limits: RateLimits | None = None,
        timeout_key: str = "reward_model.timeout_seconds",
        columns: tuple[str, ...] | None = None,
        async_calls: int = 1,
    ) -> None:
        if not 0.0 <= max_failed_share < 1.0:
            raise ValueError(f"max_failed_share={max_failed_share} must be at least 0 and below 1.")
        self._specs = tuple(specs)
        self._tokenizer = tokenizer
        self._manager = manager or NaiveRewardManager()
        self._max_failed_share = max_failed_share
        self.timeout_seconds = timeout_seconds
        self._rule_weight, self._rm_weight = rule_weight, rm_weight
        self._reward_fn_key = reward_fn_key
        # A manager with a `prepare` of its own reads the text, so its answers are decoded here.
        plain = type(self._manager).prepare is RewardManager.prepare
        self._decoder = decoder_source(tokenizer) if self._specs and plain else None
        self._pool: ScoringDispatcher | None = None
        self._pool_options: dict[str, Any] = {
            "specs": self._specs,
            "num_workers": num_workers,
            "timeout_seconds": timeout_seconds,
            "is_batch": self._manager.scores_whole_batch,
            "import_modules": tuple(import_modules),
            "decoder": self._decoder,
            "columns": columns,
            "timeout_key": timeout_key,
            "async_calls": async_calls,
        }
        if self._specs:
            pool = KillablePool(**self._pool_options)
            self._pool = ScoringDispatcher(
                pool,
                calls_each=pool.calls_each,
                num_workers=num_workers,
                timeout_seconds=timeout_seconds,
                limits=limits,
            )

    def use_nodes(self, most: int) -> None:
        """Score on up to `most` other nodes of the Ray cluster as well, with as many processes on each as here."""
        if self._pool is not None and most > 0:
            for node in start_node_pools(self._pool_options, most=most):
                self._pool.add(f"node {node.node}", node, node.num_workers)

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raise before training when the built-in rules are used and one of these names has none."""
        for spec in self._specs:
            if spec.name == default_compute_score.__name__:
                check_sources(list(dict.fromkeys(data_sources)), spec.kwargs)

    @property
    def scores_rows(self) -> bool:
        """Whether a function scores each row by itself, so that it need not wait for the others of its batch."""
        return self._pool is not None and not self._manager.scores_whole_batch

    def start(self, rows: DataProto) -> list[Future[Any]]:
        """Start scoring rows of a later batch, one future for each: give them to its `submit`. Needs `scores_rows`."""
        scored, trajectories = _scored_rows(rows)
        answers = self._manager.read(scored, self._tokenizer, self._reward_fn_key)
        return shared(self._start(answers, range(len(scored)), known_outcomes(scored)), trajectories)

    def submit(
        self, batch: DataProto, *, shaped: bool = True, started: Sequence[Future[Any]] | None = None
    ) -> PendingRewards:
        """Start scoring and return at once. `shaped=False` leaves out what the manager adds (for validation).

        `started`: what `start` has given for these rows; nothing more is started then.
        """
        scored, trajectories = _scored_rows(batch)
        known = known_outcomes(scored)
        if self._pool is None and "rm_scores" not in batch and len(known) < len(scored):
            raise RewardError("there is no reward function and the batch has no rm_scores; one of them must score.")
        answers = self._manager.read(scored, self._tokenizer, self._reward_fn_key)
        order = _spread_groups(scored.non_tensor_batch.get("uid", range(len(scored))))
        if started is None:
            futures = self._start(answers, order, known)
        else:
            futures = list(started) if trajectories is None else [started[row] for row in trajectories.last]
        return PendingRewards(self, batch, answers, futures, shaped)

    def score(self, batch: DataProto, *, shaped: bool = True) -> RewardResult:
        """Score and wait."""
        return self.submit(batch, shaped=shaped).result()

    def close(self) -> None:
        """Kill the scoring processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(
        self, answers: Sequence[Answer], order: Sequence[int], known: Mapping[int, Outcome]
    ) -> list[Future[Any]]:
        """One future per answer, in the answers' order; of a manager that scores whole batches, one.

        `known` are scored already, or will not be.
        """
        if self._pool is None:
            return []
        if not self._manager.scores_whole_batch:
            futures = {row: _done(known[row]) for row in known}
            futures |= {row: self._pool.submit(self._call(answers[row])) for row in order if row not in known}
            return [futures[row] for row in range(len(answers))]
        calls = [self._call(answer) for row, answer in enumerate(answers) if row not in known]
        if not calls:
            return []
        names = zip(BATCH_ARGUMENTS, ARGUMENTS, strict=True)
        return [self._pool.submit({plural: [call[name] for call in calls] for plural, name in names})]

    def _call(self, answer: Answer) -> dict[str, Any]:
        return self._manager.prepare(answer) if self._decoder is None else answer.arguments(answer.packed())

    def _finish(self, batch: DataProto, answers: list[Answer], outcomes: list[Outcome], shaped: bool) -> RewardResult:
        scored, trajectories = _scored_rows(batch)
        if shaped:
            outcomes = self._manager.shape(answers, outcomes)
        if "rm_scores" in batch:
            weight = self._rule_weight if self._specs else 0.0
            rm_scores = scored.tensors["rm_scores"].float()
            outcomes = add_model_scores(outcomes, rm_scores, rule_weight=weight, rm_weight=self._rm_weight)
        failures = {row: outcome for row, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        if failures:
            row, first = next(iter(failures.items()))
            logger.warning("%d of %d responses have no score; row %d: %s", len(failures), len(outcomes), row, first)
        check_failures(outcomes, self._max_failed_share)
        scores = [0.0 if isinstance(outcome, Failure) else outcome["score"] for outcome in outcomes]
        placed = place_scores(scores, last_response_token(scored), scored.tensors["responses"].shape[1])
        columns = outcome_columns(outcomes)
        texts = {TEXT: [answer.text for answer in answers]} if self._decoder is not None else {}
        rows = on_rows(score_batch(placed, outcomes, {**columns, **texts}), trajectories)
        add_turn_rewards(rows.tensors["token_level_scores"], batch, rows.tensors[FAILED])
        return RewardResult(
            columns=rows,
            metrics=reward_metrics(outcomes, columns),
            failures=failures,
            answers=answers,
        )


class PendingRewards:
    """Scores on their way. `result` waits for them; call it once the columns are needed."""

    def __init__(
        self, runner: RewardRunner, batch: DataProto, answers: list[Answer], futures: list[Future[Any]], shaped: bool
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._answers = answers
        self._futures = futures
        self._shaped = shaped

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return all(future.done() for future in self._futures)

    def result(self, meanwhile: Callable[[], None] | None = None) -> RewardResult:
        """Wait; raises `RewardError` when too many rows have no score, as soon as that is certain.

        `meanwhile` is called now and then; what it raises ends the wait.
        """
        self._wait(meanwhile)
        values = [future.result() for future in self._futures]
        known = known_outcomes(_scored_rows(self._batch)[0])
        outcomes = _spread(values, len(self._answers), self._runner._manager.scores_whole_batch, known)
        for row, (answer, outcome) in enumerate(zip(self._answers, outcomes, strict=True)):
            if isinstance(outcome, dict) and TEXT in outcome:
                answer.text = outcome[TEXT]
                # A copy: a step that is given up leaves its scores to the next one.
                outcomes[row] = {name: value for name, value in outcome.items() if name != TEXT}
        return self._runner._finish(self._batch, self._answers, outcomes, self._shaped)

    def _wait(self, meanwhile: Callable[[], None] | None) -> None:
        """Until all calls have ended, or so many have failed that the batch is lost."""
        rows = {future: row for row, future in enumerate(self._futures)}
        pool, share = self._runner._pool, self._runner._max_failed_share
        if pool is None:
            return
        is_batch = self._runner._manager.scores_whole_batch
        failures: dict[int, Failure] = {}
        num_ended = 0
        for future in _as_they_end(rows, meanwhile):
            num_ended += 1
            outcome = future.result()
            if is_batch or not isinstance(outcome, Failure):
                continue
            failures[rows[future]] = outcome
            lost = len(failures) > share * len(rows)
            hangs = _all_hang(rows, pool.calls_at_a_time)
            if num_ended < len(rows) and (lost or hangs):
                pool.cancel(rows)
                why = f"; given up after {num_ended}" + ("" if lost else ", none of which was scored")
                raise RewardError(failure_message(failures, len(rows), share, why))


def _as_they_end(futures: Iterable[Future[Any]], meanwhile: Callable[[], None] | None) -> Iterator[Future[Any]]:
    if meanwhile is None:
        yield from as_completed(futures)
        return
    left = set(futures)
    while left:
        try:
            for future in as_completed(left, timeout=_MEANWHILE_S):
                left.discard(future)
                yield future
        except TimeoutError:
            meanwhile()


def _spread_groups(uids: Iterable[Any]) -> list[int]:
    """Rows in the order in which they are scored: one answer to each prompt, then the next. A prompt whose answers all
    hang then does not look like a function that always does.
    """
    seen: Counter[str] = Counter()
    turns = []
    for row, uid in enumerate(uids):
        turns.append((seen[str(uid)], row))
        seen[str(uid)] += 1
    return [row for _, row in sorted(turns)]


def _all_hang(futures: Iterable[Future[Any]], calls_at_a_time: int) -> bool:
    """Whether about twice as many calls as run at a time have hit the time limit, and nothing else has happened."""
    ended = [future.result() for future in futures if future.done()]
    hung = all(isinstance(outcome, Failure) and outcome.kind == "timeout" for outcome in ended)
    return hung and len(ended) >= max(4, 2 * calls_at_a_time)


def _spread(values: list[Any], rows: int, is_batch: bool, known: Mapping[int, Outcome]) -> list[Outcome]:
    """One outcome per row, whatever the calls looked like. Those of `known` were not called."""
    if values and not is_batch:
        return values
    called = rows - len(known)
    outcomes: list[Outcome] = [{"score": 0.0} for _ in range(called)]
    if values:
        (value,) = values
        if isinstance(value, Failure):
            outcomes = [value] * called
        else:
            outcomes = [Failure("bad_value", entry) if isinstance(entry, str) else entry for entry in value]
    rest = iter(outcomes)
    return [known[row] if row in known else next(rest) for row in range(rows)]


def _scored_rows(batch: DataProto) -> tuple[DataProto, Trajectories | None]:
    """The rows that are scored: of a trajectory of several, the last."""
    trajectories = trajectories_of(batch)
    return (batch, None) if trajectories is None else (batch.select_idxs(trajectories.last), trajectories)


def _done(outcome: Outcome) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(outcome)
    return future

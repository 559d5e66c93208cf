"""`RayPPOTrainer`: a step of RL. Speaks to groups of workers; holds no model and knows no sharding or engine.

GRPO, RLOO, REINFORCE++, ReMax, OPO, GPG and Dr. GRPO are configurations of this loop: the estimator is a name.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from dovetail.algorithms import get_kl_controller, get_policy_loss_columns
from dovetail.algorithms.rollout_correction import interpolation_weights
from dovetail.config.root import DovetailConfig
from dovetail.controller import WorkerError, WorkerGroup
from dovetail.observability.ledger import DrawLedger
from dovetail.observability.sinks import choose_answers
from dovetail.parallel.balance import inverse_order
from dovetail.protocol import DataProto, stage_columns
from dovetail.rewards.columns import with_scores
from dovetail.rewards.runner import PendingRewards, RewardResult, RewardRunner
from dovetail.trainer.agent_metrics import agent_metrics
from dovetail.trainer.answer_files import AnswerFiles
from dovetail.trainer.arrange import PADDING, group_sizes, imbalance, lay_out
from dovetail.trainer.async_metrics import drift_metrics, staleness_metrics
from dovetail.trainer.base import BaseTrainer, EngineSpans, Metrics
from dovetail.trainer.batch_math import (
    add_advantages,
    add_baselines,
    add_rewards,
    correct_rollout,
    filtered_rows,
    mask_failed,
    mask_truncated,
    with_baseline_failures,
    with_padding,
)
from dovetail.trainer.generators import draw_number
from dovetail.trainer.group_scores import GroupScores
from dovetail.trainer.groups import RoleGroups
from dovetail.trainer.own_log_probs import PartialLogProbs, first_mini_batch, score_others
from dovetail.trainer.prompt_draws import PromptDraws, stable_seed
from dovetail.trainer.recording import Recording, Rollout, write_record
from dovetail.trainer.requests import engine_request, join_answers, num_restarts, pad_groups
from dovetail.trainer.rollout_stream import PROMPTS, READY, RolloutStream
from dovetail.trainer.step_metrics import (
    data_metrics,
    memory_metrics,
    throughput_metrics,
    timing_metrics,
    token_counts,
    update_metrics,
)
from dovetail.trainer.validation import validate

logger = logging.getLogger(__name__)

Role = Literal["actor", "critic"]


class RayPPOTrainer(BaseTrainer[RoleGroups]):
    """Call `init_workers`, then `fit`. The arguments that are not named here are those of `BaseTrainer`."""

    def __init__(
        self,
        config: DovetailConfig,
        *,
        tokenizer: Any,
        rewards: RewardRunner,
        recording: Recording | None = None,
        **run: Any,
    ) -> None:
        super().__init__(config, last_step=None if recording is None else recording.last_step, **run)
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.draws = PromptDraws(config.trainer.seed)
        self.weight_version = 0
        """The last global step that is over: its weights generate. 0 are those the run began with."""
        self._num_generated = 0
        self._recording = recording
        """Of a run that is replayed: where its batches come from."""
        self._answer_files = AnswerFiles(config.trainer, self.tracker.folder, tokenizer)
        self.stream: RolloutStream | None = None
        """Generation that runs ahead of training; None when they take turns."""

    def _init_models(self, groups: RoleGroups) -> None:
        if groups.critic is not None:
            groups.critic.init_model(self.total_steps)
        if groups.reward_model is not None:
            groups.reward_model.init_model()
        # The policy comes last, so that its engine measures what memory the other roles have left.
        groups.init_policy(self.total_steps)
        engines = groups.engines
        if engines is not None:
            engines.on_restart = lambda reason: self.tracker.event("engine_restart", self.global_step, reason=reason)
        if self.config.async_training.mode != "off" and self._recording is None:
            self.stream = RolloutStream(
                self.config,
                groups,
                DrawLedger(self.tracker.folder.path),
                draw_prompts=self._draw_prompts,
                total_steps=self.total_steps,
                scores=GroupScores(
                    self.rewards.start if self.rewards.scores_rows else None, time_limit_s=self.rewards.timeout_seconds
                ),
                on_wait=self._note_wait,
            )
        generates = groups.actor_rollout if engines is None else engines.group
        self.utilisation.ask_peaks(trains=groups.actor_rollout, generates=generates)

    def _train_step(self) -> Metrics:
        metrics: Metrics = {"training/global_step": self.global_step}
        with self.timers("step"):
            with self.timers("gen"):
                if self._recording is None:
                    rollout = self.collect()
                    metrics["training/epoch"] = self.train_loader.epoch
                else:
                    rollout = self._recording.read(self.global_step)
            rollout.metrics = metrics | rollout.metrics
            batch, learned = self.learn(rollout)
        metrics |= learned
        self.train_loader.show_batch(batch)
        self._report(batch, metrics)
        return metrics

    def collect(self) -> Rollout:
        """Generate the responses to one batch of prompts and start scoring them, where that has not begun."""
        batch = self._next_responses()
        metrics: Metrics = {}
        started = self._started_scores(batch)
        batch, order = self._arranged(batch, metrics)
        if started is not None:
            started = [started[row] for row in order]
        return Rollout(batch, order, self._start_rewards(batch, started=started), metrics)

    def learn(self, rollout: Rollout) -> tuple[DataProto, Metrics]:
        """One update from a collected batch, wherever it came from; returns it with all columns, and the metrics.

        Phases in order; each reads columns of the batch and adds columns.
        """
        batch, metrics = rollout.batch, dict(rollout.metrics)
        collected = replace(rollout, batch=batch.select())  # without the columns of the phases
        partial: PartialLogProbs | None = None
        if self.config.interpolates_old_log_probs:
            alpha = interpolation_weights(batch.tensors["weight_version"], self.global_step)
            batch = batch.union(DataProto.from_dict({"interpolation_weights": alpha}))
        elif self.config.needs_old_log_probs:
            with self.timers("old_log_prob"):
                batch, partial = self._add_old_log_probs(batch, rollout.order, metrics)
        if self.groups.ref is not None:
            with self.timers("ref"):
                batch = batch.union(self._score_by_reference(self.groups.ref, batch))
        if self.groups.critic is not None:
            with self.timers("values"):
                columns = stage_columns(batch, "compute_values")
                batch = batch.union(self._call(self.groups.critic.compute_values, columns))
        with self.timers("reward"):
            rewards = self._finish_rewards(rollout.rewards)
            if self.config.async_training.record and self.stream is not None:
                write_record(self.tracker.folder.path, self.global_step, collected, rewards)
            batch = self._take_rewards(batch, rewards, metrics)
        with self.timers("adv"):
            batch = self._add_advantages(batch, metrics)
        known = batch if partial is None else batch.select().union(partial.columns)
        # Before the update, which keeps the devices busy: after it, generation would wait for the host.
        self._answer_files.write_training(self.global_step, known)
        trained, order = self._filtered(known, rollout.order, metrics)
        if self.groups.critic is not None:
            with self.timers("update_critic"):
                rows = self._laid_out(trained, order, stage_columns(trained, "update_critic"), "critic")
                metrics |= update_metrics(self._call(self.groups.critic.update_critic, rows))
        if self.global_step > self.config.trainer.critic_warmup:
            with self.timers("update_actor"):
                extra = get_policy_loss_columns(self.config.actor_rollout_ref.actor.policy_loss.loss_mode)
                rows = self._laid_out(trained, order, stage_columns(trained, "update_actor", extra), "actor")
                update = self._call(self.groups.actor_rollout.update_actor, rows)
                metrics |= update_metrics(update, metrics)
            if partial is not None:
                with self.timers("adv"):
                    batch = batch.union(partial.completed(update))
                    metrics |= correct_rollout(batch, self.config.algorithm)[1]
        self._answer_files.hurry()
        # Also while only the critic trains: how old a response is counts in steps.
        self.weight_version = self.global_step
        self.groups.weights_changed(self.weight_version)
        if self.config.async_training.mode != "off":
            metrics |= self._staleness(batch)
        if self.stream is not None:
            self.stop.keep_step()
            kept = [uid for rows in self._carried_over().values() for uid in rows.non_tensor_batch["uid"]]
            self.stream.trained(self.global_step, batch.non_tensor_batch["uid"].tolist(), kept=kept)
            if self.stream.is_due(self.global_step) and self.config.async_training.finishes_before_update:
                with self.timers("gen"):
                    self.stream.finish_running()
            with self.timers("weight_sync"):
                metrics |= self.stream.update(self.weight_version, self.global_step)
        return batch, metrics

    def _staleness(self, batch: DataProto) -> Metrics:
        columns = batch.tensors
        versions, mask = columns["weight_version"], columns["response_mask"]
        metrics = staleness_metrics(versions, mask, self.global_step)
        if "old_log_probs" in columns and not self.config.algorithm.rollout_correction.bypass_mode:
            ours, theirs = columns["old_log_probs"], columns["rollout_log_probs"]
            metrics |= drift_metrics(ours, theirs, versions, mask, self.global_step)
        return metrics

    # ---- the phases ----

    def _call(self, method: Any, batch: DataProto) -> Any:
        """A call on the trainer's workers. What engines of their own finish meanwhile is taken and scored."""
        if self.stream is None or self.groups.engines is None:
            return method(batch)
        return method.submit(batch).get(meanwhile=self.stream.collect)

    def _score_by_reference(self, ref: WorkerGroup, batch: DataProto) -> DataProto:
        """The columns of the reference, or of a teacher in its place."""
        return self._call(ref.compute_ref_log_prob, stage_columns(batch, "compute_ref_log_prob"))

    def _next_responses(self) -> DataProto:
        """The responses to one generation batch of prompts: of the next ones, or of those that are due."""
        if self.stream is None:
            return self._generate(self._draw_prompts())
        batch = self.stream.next(self.global_step)
        self._count_generation(batch)
        return batch

    def _draw_prompts(self) -> DataProto:
        return self.draws.number(self.train_loader.next_batch())

    def _generate(self, prompts: DataProto) -> DataProto:
        """`rollout.n` responses to each prompt; for ReMax also the greedy one, whose score is the baseline."""
        n = self.config.actor_rollout_ref.rollout.n
        batch = self._answers(prompts, n=n)
        self._count_generation(batch)
        if self.config.algorithm.adv_estimator == "remax":
            greedy = self._answers(prompts, n=1, do_sample=False)
            self._count_generation(greedy)
            scored = self._finish_rewards(self._start_rewards(greedy))
            batch = add_baselines(batch, with_scores(greedy, scored.columns))
        return batch

    def _answers(self, prompts: DataProto, *, n: int, **sampling: Any) -> DataProto:
        sampling["weight_version"] = self.weight_version
        rollout = self.config.actor_rollout_ref.rollout
        request = engine_request(
            prompts, n=n, media_column=rollout.media_column, for_agents=rollout.uses_agents, **sampling
        )
        if rollout.uses_agents:
            request = pad_groups(request, self.groups.num_engines)
        answers = self.groups.rollout.generate_sequences(request)
        self._note_restarts(num_restarts(answers))
        return join_answers(prompts, answers, n=n)

    def _count_generation(self, answers: DataProto) -> None:
        """Count the tokens that engines generated in this step, also those that no update uses."""
        self._num_generated += token_counts(answers)[1]
        self.utilisation.count_generation(answers)

    def _note_restarts(self, total: int) -> None:
        if total:
            reason = f"{total} engine{'s' * (total > 1)} died while generating and finished the batch after a restart"
            self.tracker.event("engine_restart", self.global_step, reason=reason)

    def _arranged(self, batch: DataProto, metrics: Metrics) -> tuple[DataProto, list[int]]:
        """Rows in the order in which the actor's ranks take them (complete mini-batches, equal work), and it."""
        sizes, ranks, _ = self._mini_batches(batch.non_tensor_batch["uid"], "actor")
        lengths = batch.tensors["attention_mask"].sum(dim=1).tolist()
        order = lay_out(lengths, ranks, sizes, balance=self.config.trainer.balance_batch).order
        batch.reorder(order)
        metrics |= imbalance([lengths[row] for row in order], ranks)
        return batch, order

    def _laid_out(self, batch: DataProto, order: list[int], columns: DataProto, role: Role) -> DataProto:
        """`columns` of an arranged batch as a role's ranks take them for an update: the number of ranks and the
        mini-batches of the critic may differ from the actor's, and ranks need the same number of rows.

        Starts from the order in which rows were sampled: the actor's order depends on its number of ranks.
        """
        sampled = inverse_order(order)
        sizes, ranks, is_even = self._mini_batches(batch.non_tensor_batch["uid"][sampled], role)
        if is_even and role == "actor":  # arranged for it
            return columns
        lengths = batch.tensors["attention_mask"].sum(dim=1)[sampled].tolist()
        layout = lay_out(lengths, ranks, sizes, balance=self.config.trainer.balance_batch)
        rows = [row if row == PADDING else sampled[row] for row in layout.rows]
        if not is_even:
            return with_padding(columns, rows, layout.mini_batch_rows)
        return columns if rows == list(range(len(batch))) else columns.select_idxs(rows)

    def _mini_batches(self, uids: np.ndarray, role: Role) -> tuple[list[int], int, bool]:
        """Rows of each mini-batch, of a batch in the order in which it was sampled: whole groups. What PF-PPO has drawn
        are no groups any more. Also a role's number of ranks, and whether each of them gets what workers expect unless
        they are told otherwise."""
        group, section = self.groups.actor_rollout, self.config.actor_rollout_ref.actor
        if role == "critic":
            assert self.groups.critic is not None, "only called with a critic"
            group, section = self.groups.critic, self.config.critic
        ranks, expected = group.dp_size(role), section.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        if self.config.algorithm.use_pf_ppo:
            size = min(expected, len(uids))
            sizes = [size] * (len(uids) // size)
        else:
            sizes = group_sizes(uids.tolist(), section.ppo_mini_batch_size)
        return sizes, ranks, set(sizes) == {expected} and expected % ranks == 0

    def _started_scores(self, batch: DataProto) -> list[Future[Any]] | None:
        """Of a batch of the stream as it came, a score for each row; None when scoring has not begun."""
        if self.stream is None:
            return None
        return self.stream.scores.of(dict.fromkeys(draw_number(uid) for uid in batch.non_tensor_batch["uid"]))

    def _start_rewards(
        self, batch: DataProto, *, shaped: bool = True, started: list[Future[Any]] | None = None
    ) -> PendingRewards | RewardResult:
        if self.groups.reward_model is not None:
            batch = batch.union(self.groups.reward_model.compute_rm_score(stage_columns(batch, "compute_rm_score")))
        return self.rewards.submit(batch, shaped=shaped, started=started)

    def _score_validation(self, batch: DataProto) -> RewardResult:
        rewards = self._start_rewards(batch, shaped=False)
        return rewards if isinstance(rewards, RewardResult) else rewards.result()

    def _finish_rewards(self, rewards: PendingRewards | RewardResult) -> RewardResult:
        if isinstance(rewards, RewardResult):
            return rewards
        result = rewards.result() if self.stream is None else rewards.result(meanwhile=self.stream.watch_scores)
        if result.failures:
            first = next(iter(result.failures.values()))
            # Only into the file: the console has already shown it as a warning.
            self.tracker.folder.log_event(
                "reward_failed", self.global_step, count=len(result.failures), first=str(first)
            )
        return result

    def _take_rewards(self, batch: DataProto, rewards: RewardResult, metrics: Metrics) -> DataProto:
        """Scores as columns. A row that could not be scored leaves every loss, count and group."""
        metrics |= rewards.metrics
        batch = mask_failed(with_baseline_failures(with_scores(batch, rewards.columns)))
        if self.config.algorithm.filter_truncated:
            batch, share = mask_truncated(batch)
            metrics["response/filtered_truncated_share"] = share
        return batch

    def _add_old_log_probs(
        self, batch: DataProto, order: list[int], metrics: Metrics
    ) -> tuple[DataProto, PartialLogProbs | None]:
        """Old log-probs of all rows as columns, or apart those of the rows that do not get them from the update."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            engines = batch.tensors["rollout_log_probs"].clone()
            return batch.union(DataProto.from_dict({"old_log_probs": engines})), None

        def score(rows: DataProto) -> DataProto:
            scored = self._call(self.groups.actor_rollout.compute_log_prob, stage_columns(rows, "compute_log_prob"))
            entropies, mask = scored.tensors["entropys"], rows.tensors["response_mask"]
            metrics["actor/entropy"] = float((entropies * mask).sum() / mask.sum().clamp(min=1))
            return scored

        if self.config.skips_first_mini_batch:
            uids = batch.non_tensor_batch["uid"][inverse_order(order)]
            sizes, ranks, is_even = self._mini_batches(uids, "actor")
            if is_even and len(sizes) > 1:  # else rows are laid out anew for the update, with padding
                self.utilisation.unscored = first = first_mini_batch(len(batch), ranks, sizes[0])
                return batch, score_others(batch, first, score)
        return batch.union(score(batch)), None

    def _add_advantages(self, batch: DataProto, metrics: Metrics) -> DataProto:
        algorithm = self.config.algorithm
        batch, mismatch = correct_rollout(batch, algorithm)
        batch, kl = add_rewards(batch, algorithm, self.kl_ctrl)
        metrics |= mismatch | kl
        return add_advantages(batch, algorithm, num_repeat=self.config.actor_rollout_ref.rollout.n)

    def _filtered(self, batch: DataProto, order: list[int], metrics: Metrics) -> tuple[DataProto, list[int]]:
        """PF-PPO: rows resampled by score, and their order. Drawn in an order that no number of ranks changes."""
        if not self.config.algorithm.use_pf_ppo:
            return batch, order
        drawn = batch.select_idxs(inverse_order(order))
        seed = stable_seed(self.config.trainer.seed, f"pf_ppo-{self.global_step}")
        rows = filtered_rows(drawn, self.config.algorithm, seed=seed)
        if rows is None:
            return batch, order
        metrics["train/pf_ppo_distinct_share"] = len(rows.unique()) / len(rows)
        return self._arranged(drawn.select_idxs(rows), {})

    # ---- around the step ----

    def _validate(self) -> Metrics:
        """Scores of the validation prompts; empty without `data.val_files`."""
        if self.val_loader is None:
            return {}
        if self.stream is not None:
            self.stream.bring_weights(self.weight_version)
        validation = validate(
            self.config,
            self.val_loader,
            self._answers,
            self._score_validation,
            self._answer_files.validation_dump(self.global_step),
        )
        self._answer_files.write_validation(self.global_step, validation)
        shown = choose_answers(validation.dumped, self.config.trainer.log_val_generations)
        if shown:
            self.tracker.show_answers(self.global_step, shown)
        self.tracker.event("validation", self.global_step, **validation.metrics)
        return validation.metrics

    def _report(self, batch: DataProto, metrics: Metrics) -> None:
        tokens, _ = token_counts(batch)
        generated, self._num_generated = self._num_generated, 0
        seconds = self.timers.seconds()
        metrics |= data_metrics(
            batch,
            use_critic=self.groups.critic is not None,
            max_response_length=self.config.actor_rollout_ref.rollout.response_length,
        )
        metrics |= agent_metrics(batch)
        metrics |= timing_metrics(seconds, tokens, generated)
        metrics |= throughput_metrics(seconds["step"], tokens, self.config.num_devices)
        metrics |= memory_metrics(metrics)
        metrics |= self.utilisation.take(batch, seconds)

    def _begin_step(self) -> None:
        if self.stream is not None:
            self.stream.begin_step()

    def _undo_step(self) -> None:
        if self.stream is not None:
            self.stream.undo_step(self.global_step)

    def _engine_spans(self) -> EngineSpans:
        if self.stream is not None:
            return self.stream.activity()
        return [] if self.groups.engines is None else self.groups.engines.activity()

    def _close(self) -> None:
        self._answer_files.close()
        if self.config.actor_rollout_ref.rollout.uses_agents:
            try:
                self.groups.close_agents()
            except WorkerError as error:  # all steps are done; what its tools held ended with the process
                logger.warning("the agents' tools were not closed: %s", error)

    def _checkpoint_parts(
        self, state: dict[str, Any], carried: dict[str, DataProto]
    ) -> tuple[dict[str, Any], dict[str, DataProto]]:
        self._answer_files.wait()  # a checkpoint covers everything before it
        if self.stream is None:
            return state, carried
        carried = carried | self.stream.carried()
        self.stream.ledger.flush(self.global_step, durable=True)
        # Draws may have started since `state` was taken: the loader stands after all of them.
        return {**state, "stream": self.stream.state(), **self._draw_state()}, carried

    def _weights_loaded(self) -> None:
        self.weight_version = self.global_step
        self.groups.weights_changed(self.weight_version)

    def _driver_state(self) -> dict[str, Any]:
        return {"kl_ctrl": self.kl_ctrl.state_dict(), **self._draw_state()}

    def _draw_state(self) -> dict[str, Any]:
        return {"loader": self.train_loader.state_dict(), "num_drawn": self.draws.num_drawn}

    def _load_driver_state(self, state: dict[str, Any]) -> None:
        self.train_loader.load_state_dict(state["loader"])
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        self.draws.num_drawn = state["num_drawn"]
        if self.stream is None:
            if self._recording is None:
                self._warn_of_open_groups()
            return
        before = state.get("stream")
        self.stream.load(before, self.checkpoints.carried, self.weight_version)
        self.stream.ledger.resume(self.global_step, self.draws.num_drawn, was_synchronous=before is None)

    def _warn_of_open_groups(self) -> None:
        """A checkpoint of an asynchronous run holds groups that no synchronous step would take."""
        rows = [part for name, part in self.checkpoints.carried.items() if name in (READY, PROMPTS)]
        uids = {uid for part in rows for uid in part.non_tensor_batch["uid"]}
        if uids:
            logger.warning(
                "the checkpoint holds %d groups that an asynchronous run had generated ahead; async_training.mode=off "
                "trains on none of them. Resume with the mode of before to keep them.", len(uids),
            )  # fmt: skip

"""`ActorRolloutRefWorker`: the policy in one process, in any of its three roles: trained, generating, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from dovetail.backends.base import TrainBackend
from dovetail.config.fsdp import full_dtype
from dovetail.config.model import ModelConfig
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, register
from dovetail.models.load import load_config, load_tokenizer
from dovetail.models.vocabulary_divergence import Teacher, load_output_layer
from dovetail.protocol import DataProto
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.rollout.base import GenerationResult
from dovetail.weight_sync import GroupAddress
from dovetail.workers.actor import DataParallelPPOActor
from dovetail.workers.build import build_actor, build_policy
from dovetail.workers.hybrid_engine import HybridEngine
from dovetail.workers.micro_batches import MicroBatchLimit
from dovetail.workers.parity import ParityProbe, ParityReport
from dovetail.workers.training_role import CheckpointedRole, loaded
from dovetail.workers.weight_check import compare_answers
from dovetail.workers.weight_sending import SendResult, WeightSending

T = TypeVar("T")

ROLES = ("actor", "ref", "actor_rollout", "actor_ref", "actor_rollout_ref")


class ActorRolloutRefWorker(CheckpointedRole):
    """`role` names what this process does: actor, ref, or the actor with an engine (rollout), a reference, or both.

    An engine on devices of its own is a `RolloutWorker`. With LoRA the reference is the actor with its adapter off, and
    no second model is held.
    """

    def __init__(self, config: DovetailConfig, role: str = "actor_rollout_ref") -> None:
        super().__init__(config)
        if role not in ROLES:
            raise ValueError(f"role={role!r} is not one of {', '.join(ROLES)}.")
        self._is_actor, self._is_rollout, self._is_ref = (
            part in role.split("_") for part in ("actor", "rollout", "ref")
        )
        self.actor: DataParallelPPOActor | None = None
        self.refs: dict[str, DataParallelPPOActor] = {}
        """The reference without a name, or the teachers by theirs."""
        self.hybrid: HybridEngine | None = None
        self._sending: WeightSending | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int = -1) -> None:
        """Build what the role needs. `total_training_steps` is the length of the learning-rate schedule."""
        policy = self.config.actor_rollout_ref
        self.join_group()
        actor_backend: TrainBackend | None = None
        if self._is_actor:
            actor_backend = build_actor(
                policy,
                total_training_steps,
                world_size=self.world_size,
                replays_routing=self.config.replays_routing,
                device=self.device,
            )
            self.actor = self._actor_of(actor_backend)
            self.register_in_mesh("actor", actor_backend)
            if not self._is_rollout:
                self._sending = WeightSending(actor_backend, policy.rollout)
        if self._is_ref and self.config.uses_reference:
            for name, model in self.config.reference_models.items():
                self.refs[name] = self._build_ref(model, actor_backend)
            self.register_in_mesh("ref", next(iter(self.refs.values())).backend)
        if self._is_rollout:
            assert actor_backend is not None, "every role that generates here trains as well"
            self.hybrid = HybridEngine(self.config, actor_backend, device=self.device, rank=self.rank)
            size = self.hybrid.engine_size
            self._register_dispatch_collect_info("rollout", self.rank // size, self.rank % size == 0)
            if policy.rollout.verify_start:
                self.hybrid.verify().require(policy.rollout.name)
        if actor_backend is not None:
            offloading = policy.actor.offloading
            actor_backend.offload(params=offloading.param_offload, optimizer=offloading.optimizer_offload)

    @register(dispatch_mode=Dispatch.mesh("actor", pad=True))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` by the current weights, `sum_pi_squared` for estimators that read it, and
        `routed_experts` for an update that replays them."""
        actor = self._need(self.actor, "actor")
        with loaded(actor.backend, self.config.actor_rollout_ref.actor.offloading):
            scored = actor.score_responses(
                data,
                entropy=True,
                sum_squares=self.config.needs_sum_pi_squared,
                record_experts=self.config.actor_rollout_ref.actor.router_replay.mode == "R2",
            )
        columns = {"old_log_probs": scored.log_probs, "entropys": scored.entropy, "sum_pi_squared": scored.sum_squares}
        experts = scored.routed_experts
        return DataProto.from_dict(
            {name: column for name, column in columns.items() if column is not None},
            {} if experts is None else {ROUTED_EXPERTS: experts},
        )

    @register(dispatch_mode=Dispatch.mesh("ref", pad=True))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob`: log-probs of the frozen reference, or of a teacher in its place, which `meta_info["teacher"]`
        names where there are several."""
        ref, distill = self._need(self.refs.get(data.meta_info.get("teacher", "")), "ref"), self.config.distill
        with loaded(ref.backend, self._offloading_of(ref)):
            if self.config.compares_vocabularies:
                log_probs, hidden = ref.hidden_states(data)
                return DataProto.from_dict({"ref_log_prob": log_probs, "teacher_hidden": hidden})
            if not self.config.lists_teacher_tokens:
                log_probs, _ = ref.compute_log_prob(data)
                return DataProto.from_dict({"ref_log_prob": log_probs})
            student = load_config(
                self._model.path,
                trust_remote_code=self._model.trust_remote_code,
                external_lib=self._model.external_lib,
            )
            vocab_size = student.get_text_config().vocab_size
            log_probs, ids, top = ref.top_tokens(data, top_k=distill.top_k, vocab_size=vocab_size)
        return DataProto.from_dict({"ref_log_prob": log_probs, "teacher_top_ids": ids, "teacher_top_log_probs": top})

    @register(dispatch_mode=Dispatch.mesh("actor"))
    def update_actor(self, data: DataProto) -> DataProto:
        """One PPO update; metrics in `meta_info["metrics"]`, equal on every rank. `old_log_probs` of the first
        mini-batch, where they are the update's own."""
        actor = self._need(self.actor, "actor")
        with loaded(actor.backend, self.config.actor_rollout_ref.actor.offloading, trains=True):
            metrics, old_log_probs = actor.update(data)
            metrics.update(actor.backend.memory())
        if self.hybrid is not None:
            self.hybrid.weights_changed()
        columns = {} if old_log_probs is None else {"old_log_probs": old_log_probs}
        return DataProto.from_dict(columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.mesh("rollout", pad=True))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses for these prompts, `meta_info["n"]` of each side by side."""
        return self._need(self.hybrid, "rollout").generate(prompts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_groups(
        self,
        prompts: DataProto | None,
        snapshot: DataProto | None,
        counts: Sequence[int],
        must_finish: Sequence[str],
        max_begun: int,
        version: int,
    ) -> DataProto | None:
        """Take up the prompts whose column `engine` is this rank; returns when `counts[rank]` groups have finished.

        See `HybridEngine.generate_groups`.
        """
        hybrid = self._need(self.hybrid, "rollout")
        return hybrid.generate_groups(
            prompts,
            snapshot,
            count=counts[self.rank],
            must_finish=must_finish,
            max_begun=max_begun,
            version=version,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_groups(self) -> DataProto | None:
        """What the unfinished groups of this rank have so far."""
        return self._need(self.hybrid, "rollout").snapshot_groups()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def abort_groups(self, uids: Sequence[str]) -> None:
        """Forget these groups, finished or not."""
        self._need(self.hybrid, "rollout").abort_groups(uids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_agents(self) -> None:
        """The run is over: give back what the agents' tools hold."""
        if self.hybrid is not None:
            self.hybrid.close_agents()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_parity(self) -> ParityReport:
        """Send the weights to the engine and hold its greedy answers against the trainer's forward."""
        return self._need(self.hybrid, "rollout").verify()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_group(self, num_receivers: int, host: str) -> GroupAddress | None:
        """For engines elsewhere: rank 0 begins a group that they join at this address."""
        return self._need(self._sending, "the trainer of engines elsewhere").open(num_receivers, host)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect_weight_group(self) -> SendResult:
        """Blocks until all engines have joined."""
        return self._need(self._sending, "the trainer of engines elsewhere").connect()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, *, check: bool = False) -> SendResult:
        """The current weights to all engines of the group; `check` says what they must hold then."""
        sending, actor = self._need(self._sending, "the trainer of engines elsewhere"), self._need(self.actor, "actor")
        with loaded(actor.backend, self.config.actor_rollout_ref.actor.offloading):
            return sending.send(check=check)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def judge_probe(self, answers: list[GenerationResult]) -> ParityReport:
        """Hold an engine's greedy answers against the forward of the trained model."""
        actor, model = self._need(self.actor, "actor"), self.config.actor_rollout_ref.model
        tokenizer = load_tokenizer(self.config.tokenizer_source, trust_remote_code=model.trust_remote_code)
        with loaded(actor.backend, self.config.actor_rollout_ref.actor.offloading):
            return compare_answers(ParityProbe(self.config, tokenizer), answers, actor.backend)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> None:
        """Give the device to the engine, with the current weights."""
        self._need(self.hybrid, "rollout").rollout_mode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Give the device back to training."""
        self._need(self.hybrid, "rollout").trainer_mode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote, on any number of processes; returns its `extra`."""
        extra = super().load_checkpoint(local_path)
        if self.hybrid is not None:
            self.hybrid.weights_changed()
        return extra

    def close(self) -> None:
        if self.hybrid is not None:
            self.hybrid.close()

    @property
    def _trained(self) -> DataParallelPPOActor:
        return self._need(self.actor, "actor")

    def _build_ref(self, model: ModelConfig, actor_backend: TrainBackend | None) -> DataParallelPPOActor:
        policy = self.config.actor_rollout_ref
        if actor_backend is not None and policy.model.uses_lora and model is policy.model:
            return self._actor_of(actor_backend, is_ref=True, adapters=False)
        backend = build_policy(
            model,
            strategy=policy.ref.strategy,
            fsdp=policy.ref.fsdp_config,
            megatron=policy.ref.megatron,
            optim=None,
            sp_size=policy.ref.ulysses_sequence_parallel_size,
            world_size=self.world_size,
            use_torch_compile=policy.ref.use_torch_compile,
            share_prefixes=policy.actor.use_prefix_grouper,
            fp32_head=policy.rollout.fp32_lm_head,
            longest_row=policy.rollout.context_length,
            device=self.device,
        )
        backend.offload(params=policy.ref.offloading.param_offload, optimizer=False)
        return self._actor_of(backend, is_ref=True)

    def _offloading_of(self, ref: DataParallelPPOActor) -> Any:
        policy = self.config.actor_rollout_ref
        shares_actor = self.actor is not None and ref.backend is self.actor.backend
        return policy.actor.offloading if shares_actor else policy.ref.offloading

    def _actor_of(self, backend: TrainBackend, *, is_ref: bool = False, adapters: bool = True) -> DataParallelPPOActor:
        policy = self.config.actor_rollout_ref
        limits = policy.ref if is_ref else policy.rollout
        correction = self.config.algorithm.rollout_correction
        in_update = correction.bypass_mode or self.config.interpolates_old_log_probs
        rows = policy.actor.ppo_mini_batch_size * policy.rollout.n // backend.rank_info.dp_size
        return DataParallelPPOActor(
            policy.actor,
            backend,
            mini_batch_rows=max(1, rows),
            log_prob_limit=MicroBatchLimit.of(
                limits.log_prob_use_dynamic_bsz,
                limits.log_prob_micro_batch_size_per_gpu or max(1, rows),
                limits.log_prob_max_token_len_per_gpu,
                by_prompt=policy.actor.use_prefix_grouper,
            ),
            loss_scale_factor=self.config.loss_scale_factor,
            seed=self.config.trainer.seed,
            adapters=adapters,
            correction=correction if in_update and not is_ref else None,
            distill=self.config.distill if self.config.distills else None,
            teacher=self._teacher() if self.config.compares_vocabularies and not is_ref else None,
        )

    def _teacher(self) -> Teacher:
        """The teacher's output layer, beside the student: hidden states are sent, and distributions made here."""
        (model,), dtype = self.config.reference_models.values(), self.config.actor_rollout_ref.ref.compute_dtype
        layer = load_output_layer(
            model.path,
            dtype=getattr(torch, full_dtype(dtype)),
            device=self.device,
            override_config=model.override_config,
            trust_remote_code=model.trust_remote_code,
            external_lib=model.external_lib,
        )
        return Teacher(layer, self.config.distill.divergence, log_prob_min=self.config.distill.log_prob_min_clamp)

    def _need(self, part: T | None, name: str) -> T:
        if part is None:
            raise RuntimeError(f"{self.role} was not built as {name}, or init_model has not been called.")
        return part

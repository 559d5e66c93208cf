"""The whole configuration as one typed tree. Reads no file and checks no pair of sections."""

from __future__ import annotations

import math
from typing import Any

from pydantic import model_validator

from dovetail.config.actor import ActorConfig
from dovetail.config.algorithm import ESTIMATORS_WITH_CRITIC, OPTIMAL_TOKEN_BASELINES, AlgorithmConfig
from dovetail.config.async_training import AsyncTrainingConfig
from dovetail.config.base import Section, key, look_up, read_with, section, unused, when_is
from dovetail.config.critic import CriticConfig
from dovetail.config.data import DataConfig
from dovetail.config.inherit import filled
from dovetail.config.methods import DistillConfig, DPOConfig, RewardTrainingConfig, SFTConfig
from dovetail.config.model import ModelConfig
from dovetail.config.names import ADV_ESTIMATORS, POLICY_LOSSES, READ_FOR_NAMES, unknown_names
from dovetail.config.profiler import ProfilerConfig
from dovetail.config.ray_init import RayInitConfig
from dovetail.config.ref import RefConfig
from dovetail.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.config.trainer import TrainerConfig

_NOT_SAMPLED = "trainer.method={trainer.method} samples no responses"


class ActorRolloutRefConfig(Section):
    """The policy in its three roles."""

    hybrid_engine: bool = key(True, "Engine and trainer take turns on the same devices.")
    nccl_timeout: int = key(600, "Seconds before a stuck collective fails.", ge=1)
    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    ref: RefConfig = section(RefConfig)

    @property
    def takes_adapters(self) -> bool:
        """Whether the engine can take LoRA adapters beside the weights they change."""
        return (self.rollout.name, self.rollout.mode) == ("vllm", "sync") and self.hybrid_engine


class DovetailConfig(Section):
    """Everything that can be set. Build it with keyword dicts or with `dovetail.config.load_config`."""

    rules = (
        unused(_NOT_SAMPLED, when_is("generates", False), only="actor_rollout_ref.ref.* algorithm.* async_training.*"),
        unused(
            "trainer.method={trainer.method} scores no responses",
            when_is("scores", False),
            only="reward_model.* custom_reward_function.*",
        ),
        unused(
            "responses of fine-tuning's validation are scored by functions alone",
            when_is("scores_val_samples", True),
            only="reward_model.enable reward_model.model.*",
        ),
        unused(_NOT_SAMPLED, when_is("uses_engine", False), only="actor_rollout_ref.rollout.*"),
        *(read_with("trainer.method", name, only=f"{name}.*") for name in ("dpo", "sft")),
        read_with("trainer.method", "reward", only="reward_training.*"),
        unused("trainer.method=distill reads it (`dovetail distill`)", when_is("distills", False), only="distill.*"),
    )

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    dpo: DPOConfig = section(DPOConfig)
    reward_training: RewardTrainingConfig = section(RewardTrainingConfig)
    sft: SFTConfig = section(SFTConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    distill: DistillConfig = section(DistillConfig)
    global_profiler: ProfilerConfig = section(ProfilerConfig)
    ray_init: RayInitConfig = section(RayInitConfig)

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, values: Any) -> Any:
        return filled(cls, values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _names_are_registered(self) -> DovetailConfig:
        if messages := unknown_names({key: look_up(self, "", key) for key in READ_FOR_NAMES}):
            raise ValueError(" ".join(messages.values()))
        return self

    @property
    def loss_mode_in_force(self) -> str:
        """The policy loss that is computed: in bypass mode the correction may ask for another."""
        correction = self.algorithm.rollout_correction
        reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
        return "reinforce" if reinforce else self.actor_rollout_ref.actor.policy_loss.loss_mode

    @property
    def generates(self) -> bool:
        """Whether the method samples responses; the others train on what a file has."""
        return self.trainer.method in ("rl", "distill")

    @property
    def num_val_samples(self) -> int:
        """Validation prompts that fine-tuning answers; RL answers all of them."""
        if self.trainer.method != "sft" or not self.data.val_paths:
            return 0
        policy = self.actor_rollout_ref
        in_place = self.trainer.world_size == 1 and not policy.model.uses_lora and policy.actor.strategy != "megatron"
        return (4 if in_place else 0) if self.sft.val_samples is None else self.sft.val_samples

    @property
    def scores_val_samples(self) -> bool:
        """Whether the responses of fine-tuning's validation are scored: where a function is given that does it."""
        listed = self.reward_model.reward_kwargs.get("rewards")
        return self.num_val_samples > 0 and (self.custom_reward_function.path is not None or bool(listed))

    @property
    def scores(self) -> bool:
        """Whether any response gets a reward."""
        return self.generates or self.scores_val_samples

    @property
    def tokenizer_source(self) -> str:
        """Folder of the tokenizer that prompts and responses of the policy are written with."""
        return self.data.tokenizer or self.actor_rollout_ref.model.tokenizer_source

    @property
    def uses_engine(self) -> bool:
        """Whether anything is generated, for training or to be looked at."""
        return self.generates or self.num_val_samples > 0

    @property
    def rows_per_example(self) -> int:
        """Sequences of one row of the data, where a method trains on a data set: preferences have two."""
        return 2 if self.trainer.method in ("dpo", "reward") else 1

    @property
    def sequences_trained_together(self) -> int:
        """Sequences that one micro-batch must hold: a pair, but for KTO, which judges one at a time."""
        return 1 if self.trainer.method == "dpo" and self.dpo.loss_type == "kto" else self.rows_per_example

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a sequence that is trained."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.prompt_length + rollout.response_length if self.generates else self.data.longest

    @property
    def uses_critic(self) -> bool:
        """Whether the network of the section `critic` is trained: a value network, or a reward model."""
        if self.trainer.method != "rl":
            return self.trainer.method == "reward"
        enable = self.critic.enable
        return self.algorithm.adv_estimator in ESTIMATORS_WITH_CRITIC if enable is None else enable

    @property
    def uses_reference(self) -> bool:
        """Whether the reference policy, or the teacher in its place, is computed."""
        asked = self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return self.distills or (self.generates and asked)

    @property
    def distills(self) -> bool:
        """Whether the run learns from a teacher, which takes the place of the reference."""
        return self.trainer.method == "distill"

    @property
    def scores_training(self) -> bool:
        """Whether training responses get a reward: always, but for distillation without `distill.reward_coef`."""
        return not self.distills or self.distill.reward_coef > 0

    @property
    def lists_teacher_tokens(self) -> bool:
        """Whether the teacher lists its most likely tokens for the update."""
        return self.distills and self.distill.kl == "top_k"

    @property
    def compares_vocabularies(self) -> bool:
        """Whether the update compares the whole distributions of student and teacher."""
        return self.distills and self.distill.kl == "full"

    @property
    def reference_models(self) -> dict[str, ModelConfig]:
        """The networks of the reference: the policy's own without a name, or the teachers by theirs."""
        model, distill = self.actor_rollout_ref.model, self.distill
        if not self.distills:
            return {"": model}
        own = distill.teacher.model_dump(include={"trust_remote_code", "external_lib", "override_config"})
        own |= {"hf_config_path": None, "tokenizer_path": None, "lora_rank": 0, "lora_adapter_path": None}
        paths = distill.teacher_paths.items()
        return {name: model.model_copy(update={**own, "path": path}) for name, path in paths}

    @property
    def teacher_devices(self) -> int:
        """Devices of the teacher alone; 0 when it shares the student's, or there is none."""
        return self.distill.teacher.own_devices if self.distills else 0

    @property
    def num_devices(self) -> int:
        """Devices of the whole run: of the trainer, of engines alone, of the teacher alone."""
        return self.trainer.world_size + self.actor_rollout_ref.rollout.own_devices + self.teacher_devices

    @property
    def generation_batch_size(self) -> int:
        """Prompts generated at a time: a batch for training, or a round of dynamic sampling."""
        return self.data.generation_batch_size if self.algorithm.filter_groups.enable else self.data.train_batch_size

    @property
    def groups_in_flight(self) -> int:
        """Most prompts whose responses are generated at a time, over all engines."""
        count, settings = self.generation_batch_size, self.async_training
        if settings.mode == "off":
            return count
        if self.actor_rollout_ref.hybrid_engine:
            return settings.max_in_flight or count + math.ceil(count / 8)
        return (1 + self.group_staleness_bound) * count

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the batch gets old log-probs before the update.

        Not when the whole batch is one optimizer step on fresh responses: the update's own log-probs are the old ones
        then. Nor when the update interpolates them, nor where fresh responses have no advantages that a ratio weighs:
        those of a divergence from a teacher alone.
        """
        actor = self.actor_rollout_ref.actor
        if self.interpolates_old_log_probs:
            return False
        one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= self.data.train_batch_size
        unweighted = not self.scores_training and self.distill.kl != "sampled"
        own_ratio = self.staleness_bound == 0 and (one_step or unweighted)
        return not own_ratio or self._reads_old_log_probs

    @property
    def _reads_old_log_probs(self) -> bool:
        """Whether something reads the old log-probs before the update."""
        algorithm = self.algorithm
        reads = algorithm.use_kl_in_reward or algorithm.rollout_correction.active or self.needs_sum_pi_squared
        return reads or (self.distills and self.distill.kl == "sampled")

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether the old log-probs come with the sum of squared probabilities of each distribution."""
        asked = self.actor_rollout_ref.actor.calculate_sum_pi_squared
        return asked or self.algorithm.adv_estimator in OPTIMAL_TOKEN_BASELINES

    @property
    def has_log_prob_pass(self) -> bool:
        """Whether the actor computes the old log-probs; in bypass mode the engine's stand for them."""
        return self.needs_old_log_probs and not self.algorithm.rollout_correction.bypass_mode

    @property
    def replays_routing(self) -> bool:
        """Whether experts of a mixture are recorded and replayed."""
        return self.generates and self.actor_rollout_ref.actor.router_replay.mode != "disabled"

    @property
    def skips_first_mini_batch(self) -> bool:
        """Whether the log-prob pass leaves out the first mini-batch: its update has the weights of that pass, so that
        its own log-probs are the old ones.

        Not where something reads them before the update, which a user's estimator or loss may do. Nor where the first
        optimizer step takes other rows (shuffle, PF-PPO), comes again (epochs) or never (warm-up of the critic), nor
        with pipeline stages, of which only the last has the log-probs of an update.
        """
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        known = actor.policy_loss.loss_mode in POLICY_LOSSES and algorithm.adv_estimator in ADV_ESTIMATORS
        first_stays = not (actor.shuffle or algorithm.use_pf_ppo or self.trainer.critic_warmup)
        one_stage = actor.strategy != "megatron" or actor.megatron.pipeline_model_parallel_size == 1
        # R2 records the experts of all rows in the pass.
        known = known and actor.router_replay.mode != "R2"
        skips = known and first_stays and one_stage and actor.ppo_epochs == 1 and self.staleness_bound == 0
        return skips and self.has_log_prob_pass and not self._reads_old_log_probs

    @property
    def staleness_bound(self) -> int:
        """Most updates between the weights of a response's oldest token and its training; 0: always fresh."""
        return self.async_training.staleness_bound

    @property
    def interpolates_old_log_probs(self) -> bool:
        """Whether the update makes the old log-probs itself, from the engine's and its own (`prox=loglinear`)."""
        return self.staleness_bound > 0 and self.async_training.prox == "loglinear"

    @property
    def surplus_steps(self) -> int:
        """Most steps that dynamic sampling keeps a group beyond the step it was generated for."""
        if not self.algorithm.filter_groups.enable:
            return 0
        return -(-(self.generation_batch_size - 1) // self.data.train_batch_size)

    @property
    def group_staleness_bound(self) -> int:
        """`staleness_bound` of a group that dynamic sampling may have kept."""
        return self.staleness_bound + self.surplus_steps

    @property
    def data_seed(self) -> int:
        """Seed of the data order."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def loss_scale_factor(self) -> float:
        """Divisor of `seq-mean-token-sum-norm`."""
        return self.actor_rollout_ref.actor.loss_scale_factor or float(self.data.max_response_length)

    @property
    def overlong_limit(self) -> int:
        """Longest response that the overlong buffer counts from."""
        return self.reward_model.max_resp_len or self.data.max_response_length

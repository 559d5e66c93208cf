"""`reward_model.*` and `custom_reward_function.*`: how an answer is scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dovetail.config.actor import ActorConfig, Strategy
from dovetail.config.base import Section, inherits
from dovetail.config.critic import CriticConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.home import HomePath
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import RewardNetworkConfig


class CustomRewardFunctionConfig(Section):
    """A user's reward function, by file and name."""

    path: HomePath | None = Field(None, description="Python file (or `pkg://module`). Null: the built-in rules.")
    name: str = Field("compute_score", description="Name of the function in that file.")
    reward_kwargs: dict[str, Any] = Field({}, description="Extra arguments of the function (free-form).")


class RewardManagerModuleConfig(Section):
    """A user's reward manager, by file and name."""

    path: HomePath | None = Field(None, description="Python file of the manager. Null: a registered one.")
    name: str | None = Field(None, description="Name of the class in that file.")


class OverlongBufferConfig(Section):
    """Soft punishment of long answers (DAPO)."""

    enable: bool = Field(False, description="Lower the score of answers that run into the buffer.")
    len: int = Field(0, ge=0, description="Tokens before the longest response in which the penalty grows.")
    penalty_factor: float = Field(1.0, ge=0, description="Penalty at the end of the buffer.")
    log: bool = Field(False, description="Report the penalty as a metric.")


class SandboxFusionConfig(Section):
    """A remote sandbox that runs code answers."""

    url: str | None = Field(None, description="Address of the sandbox. Null: no remote sandbox.")
    max_concurrent: int = Field(
        64, ge=1, description="Programs at a time in the remote sandbox, over all scoring processes."
    )
    memory_limit_mb: int = Field(1024, ge=1, description="Memory of one program, in MiB.")


class RewardModelConfig(Section):
    """Reward rules, manager and network."""

    reward_manager: str = Field(
        "naive",
        description="naive, dapo, batch, prime or rate_limited; other names need `trainer.import_modules` or "
        "`reward_model.reward_manager_module`.",
    )
    reward_manager_module: RewardManagerModuleConfig = Field(
        RewardManagerModuleConfig.model_construct(), description="A user's manager."
    )
    reward_kwargs: dict[str, Any] = Field({}, description="Extra arguments of the manager (free-form).")
    max_resp_len: int | None = Field(
        None, ge=1, description="Response length at which the penalty is full. Null: `data.max_response_length`."
    )
    overlong_buffer: OverlongBufferConfig = Field(
        OverlongBufferConfig.model_construct(), description="Punishment of long answers."
    )
    num_workers: int = Field(2, ge=1, description="Processes that score answers, on each node.")
    score_on: Literal["every_node", "driver_node"] = Field(
        "every_node", description="Where they run on a Ray cluster: on all its nodes, or on the driver's alone."
    )
    max_concurrent: int = Field(
        1, ge=1, description="Calls at a time with `reward_manager=rate_limited`, over all scoring processes."
    )
    max_rpm: int | None = Field(None, ge=1, description="Calls per minute with `rate_limited`. Null: no limit.")
    max_tpm: int | None = Field(None, ge=1, description="Tokens per minute with `rate_limited`. Null: no limit.")
    estimated_tokens_per_request: int = Field(
        2000, ge=1, description="Tokens that one call counts for against `max_tpm`."
    )
    timeout: float | None = Field(
        None, gt=0, description="Time for one score with `rate_limited`. Null: `timeout_seconds`."
    )
    max_failed_share: float = Field(
        0.2, ge=0, lt=1, description="Share of a batch that may stay without a score before the run stops."
    )
    timeout_seconds: float = Field(300.0, gt=0, description="Time for one score; then the worker is killed.")
    code_isolation: Literal["auto", "required"] = Field(
        "auto",
        description="Programs in answers run in a sandbox where the machine allows namespaces. Elsewhere `auto` "
        "warns and runs them all the same, `required` stops the run.",
    )
    sandbox_fusion: SandboxFusionConfig = Field(SandboxFusionConfig.model_construct(), description="Code sandbox.")
    enable: bool = Field(False, description="Score with a reward network as well.")
    enable_resource_pool: bool = Field(False, description="Give the reward network its own devices.")
    nnodes: int = Field(0, ge=0, description="Nodes of those devices.")
    n_gpus_per_node: int = Field(8, ge=0, description="Devices per such node.")
    strategy: Strategy = inherits(
        "actor_rollout_ref.actor.strategy", ActorConfig, "strategy", description="Training backend."
    )
    model: RewardNetworkConfig = Field(RewardNetworkConfig.model_construct(), description="Network.")
    megatron: MegatronConfig = Field(MegatronConfig.model_construct(), description="Parallelism with megatron.")
    micro_batch_size_per_gpu: int | None = inherits(
        "critic.forward_micro_batch_size_per_gpu",
        CriticConfig,
        "forward_micro_batch_size_per_gpu",
        description="Sequences per forward on one device.",
        ge=1,
    )
    use_dynamic_bsz: bool = inherits(
        "critic.use_dynamic_bsz", CriticConfig, "use_dynamic_bsz", description="Cut forwards by token count."
    )
    forward_max_token_len_per_gpu: int | None = inherits(
        "critic.forward_max_token_len_per_gpu",
        CriticConfig,
        "forward_max_token_len_per_gpu",
        description="Tokens per forward.",
        ge=1,
    )
    max_length: int | None = Field(None, ge=1, description="Longest input of the network. Null: its context.")
    ulysses_sequence_parallel_size: int = Field(1, ge=1, description="Devices that share each sequence (Ulysses).")
    nccl_timeout: int | None = Field(
        None, ge=1, description="Seconds before a stuck collective fails. Null: `actor_rollout_ref.nccl_timeout`."
    )

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

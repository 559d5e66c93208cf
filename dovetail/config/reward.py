"""`reward_model.*` and `custom_reward_function.*`: how a response is scored."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.config.actor import ULYSSES, ActorConfig, Strategy
from dovetail.config.algorithm import GDPO_READS
from dovetail.config.base import HomePath, Section, inherits, key, read_with, section, unsupported, unused, when_is
from dovetail.config.critic import CriticConfig
from dovetail.config.data import CustomClassConfig
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.megatron import MegatronConfig
from dovetail.config.model import RewardNetworkConfig
from dovetail.config.names import REWARD_MANAGERS, listed

_RATES = "max_concurrent max_rpm max_tpm estimated_tokens_per_request timeout"


def _not_dapo(config: Any, key: str) -> bool:
    """Whether a built-in manager scores that knows no such penalty; a user's own may."""
    reward = config.reward_model
    own = reward.reward_manager_module.path or reward.reward_manager not in REWARD_MANAGERS
    return not own and reward.reward_manager != "dapo"


def _scored_by_list(config: Any, key: str) -> bool:
    return bool(config.reward_model.reward_kwargs.get("rewards"))


class CustomRewardFunctionConfig(Section):
    """A user's reward function, by file and name."""

    rules = (unused("reward_model.reward_kwargs.rewards lists the functions that score", _scored_by_list),)

    path: HomePath | None = key(None, "Python file (or `pkg://module`). Null: the built-in rules.")
    name: str = key("compute_score", "Name of the function in that file.")
    reward_kwargs: dict[str, Any] = key({}, "Extra arguments of the function.")


class OverlongBufferConfig(Section):
    """Soft punishment of long responses (DAPO)."""

    rules = (
        read_with(".enable", True, only="len penalty_factor log"),
        unused("reward_model.reward_manager=dapo reads it", _not_dapo),
        unused(GDPO_READS, when_is("algorithm.adv_estimator", "gdpo")),
    )

    enable: bool = key(False, "Lower the score of responses that run into the buffer.")
    len: int = key(0, "Tokens before the longest response in which the penalty grows.", ge=0)
    penalty_factor: float = key(1.0, "Penalty at the end of the buffer.", ge=0)
    log: bool = key(False, "Report the penalty as a metric.")


class SandboxFusionConfig(Section):
    """A remote sandbox that runs code responses."""

    rules = (unused("each process of reward_model.num_workers runs one", when_is("url", None), only="max_concurrent"),)

    url: str | None = key(None, "Address of the sandbox. Null: no remote sandbox.")
    max_concurrent: int = key(64, "Programs at a time in the remote sandbox, over all scoring processes.", ge=1)
    memory_limit_mb: int = key(1024, "Memory of one program, in MiB.", ge=1)


class RewardModelConfig(Section):
    """Reward rules, manager and network."""

    rules = (
        unused(
            "no reward network is built without reward_model.enable=True",
            when_is("reward_model.enable", False),
            only="model.* megatron.* strategy micro_batch_size_per_gpu use_dynamic_bsz max_length nccl_timeout "
            "forward_max_token_len_per_gpu ulysses_sequence_parallel_size enable_resource_pool",
        ),
        unused("the reward network runs on the trainer's devices", only="nnodes n_gpus_per_node"),
        unsupported("the reward network runs on the trainer's devices; use False", True, only="enable_resource_pool"),
        read_with("reward_model.overlong_buffer.enable", True, only="max_resp_len"),
        read_with("reward_model.reward_manager", "rate_limited", only=_RATES),
    )

    reward_manager: str = key(
        "naive",
        f"{listed(REWARD_MANAGERS)[:-1]} or `reward_model.reward_manager_module`.",
        reads={"gdpo": "naive", "remote": "naive"},
    )
    reward_manager_module: CustomClassConfig = section(CustomClassConfig)
    reward_kwargs: dict[str, Any] = key({}, "Extra arguments of the manager.")
    max_resp_len: int | None = key(None, "Length at which the penalty is full. Null: the longest response.", ge=1)
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)
    num_workers: int = key(2, "Processes that score responses, on each node.", ge=1)
    async_calls: int = key(
        16, "Calls at a time in each of them, where every reward function is `async def` and scores one response.", ge=1
    )
    score_on: Literal["every_node", "driver_node"] = key(
        "every_node", "Where they run on a Ray cluster: on all its nodes, or on the driver's alone."
    )
    max_concurrent: int = key(1, "Calls at a time with `rate_limited`, over all processes.", ge=1)
    max_rpm: int | None = key(None, "Calls per minute with `rate_limited`. Null: no limit.", ge=1)
    max_tpm: int | None = key(None, "Tokens per minute with `rate_limited`. Null: no limit.", ge=1)
    estimated_tokens_per_request: int = key(2000, "Tokens that one call counts for against `max_tpm`.", ge=1)
    timeout: float | None = key(None, "Time for one score with `rate_limited`. Null: `timeout_seconds`.", gt=0)
    max_failed_share: float = key(0.2, "Share of a batch that may lack a score before the run stops.", ge=0, lt=1)
    timeout_seconds: float = key(300.0, "Time for one score; then the worker is killed.", gt=0)
    code_isolation: Literal["auto", "required"] = key(
        "auto",
        "Programs in responses run in a sandbox where the machine allows namespaces. Elsewhere `auto` "
        "warns and runs them all the same, `required` stops the run.",
    )
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    enable: bool = key(False, "Score with a reward network as well.")
    enable_resource_pool: bool = key(False, "Give the reward network its own devices.")
    nnodes: int = key(0, "Nodes of those devices.", ge=0)
    n_gpus_per_node: int = key(8, "Devices per such node.", ge=0)
    strategy: Strategy = inherits("actor_rollout_ref.actor.strategy", ActorConfig)
    model: RewardNetworkConfig = section(RewardNetworkConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    micro_batch_size_per_gpu: int | None = inherits("critic.forward_micro_batch_size_per_gpu", CriticConfig)
    use_dynamic_bsz: bool = inherits("critic.use_dynamic_bsz", CriticConfig)
    forward_max_token_len_per_gpu: int | None = inherits("critic.forward_max_token_len_per_gpu", CriticConfig)
    max_length: int | None = key(None, "Longest input of the network. Null: its context.", ge=1)
    ulysses_sequence_parallel_size: int = key(1, "Devices that share each sequence (Ulysses).", ge=1, rules=ULYSSES)
    nccl_timeout: int | None = key(
        None, "Seconds before a stuck collective fails. Null: `actor_rollout_ref.nccl_timeout`.", ge=1
    )

    @property
    def fsdp_config(self) -> FSDPConfig:
        """Sharding, which this role has in its network's section."""
        return self.model.fsdp_config

    @property
    def offloading(self) -> FSDPConfig | MegatronConfig:
        """The section whose `param_offload` and `optimizer_offload` count."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config

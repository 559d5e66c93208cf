"""Names that users of verl know are there, and are what they were: classes, functions, methods, dispatch modes."""

from __future__ import annotations

import importlib

import pytest

from dovetail.controller.registration import Dispatch, registered_methods
from dovetail.rollout import RolloutEngine, get_engine_class, get_rollout_class
from dovetail.workers.actor_rollout_ref import ActorRolloutRefWorker
from dovetail.workers.critic_worker import CriticWorker
from dovetail.workers.reward_model_worker import RewardModelWorker

pytestmark = pytest.mark.unit

NAMES: dict[str, str] = {
    "protocol": "DataProto DataProtoFuture DataProtoItem pad_dataproto_to_divisor unpad_dataproto",
    "controller": "Worker WorkerGroup RayWorkerGroup RayResourcePool RayClassWithInitArgs create_colocated_worker_cls "
    "Dispatch Execute register",
    "workers.actor_rollout_ref": "ActorRolloutRefWorker",
    "workers.critic_worker": "CriticWorker",
    "workers.reward_model_worker": "RewardModelWorker",
    "workers.actor": "DataParallelPPOActor",
    "workers.critic": "DataParallelPPOCritic",
    "workers.megatron": "MegatronPPOActor MegatronPPOCritic",
    "rollout.vllm": "vLLMRollout",
    "rollout.sglang": "SGLangRollout",
    "weight_sync": "FSDPVLLMShardingManager MegatronVLLMShardingManager FSDPSGLangShardingManager",
    "backends.fsdp2": "apply_fsdp2 fsdp2_clip_grad_norm_",
    "parallel.ulysses": "gather_seq_scatter_heads gather_heads_scatter_seq",
    "algorithms": "compute_gae_advantage_return compute_grpo_outcome_advantage compute_remax_outcome_advantage "
    "compute_reinforce_plus_plus_outcome_advantage compute_policy_loss_vanilla compute_value_loss agg_loss kl_penalty "
    "apply_kl_penalty compute_response_mask AdaptiveKLController FixedKLController",
    "trainer.ppo": "RayPPOTrainer",
    "trainer.dapo": "RayDAPOTrainer",
    "trainer.main_ppo": "main run_ppo",
    "trainer.main_dapo": "main",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_known_name_is_there(module: str) -> None:
    found = importlib.import_module(f"dovetail.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(
    ("worker", "on_all", "by_rows"),
    [
        (
            ActorRolloutRefWorker,
            "init_model rollout_mode trainer_mode save_checkpoint load_checkpoint",
            "generate_sequences compute_log_prob compute_ref_log_prob update_actor",
        ),
        (CriticWorker, "init_model save_checkpoint load_checkpoint", "compute_values update_critic"),
        (RewardModelWorker, "init_model", "compute_rm_score"),
    ],
)
def test_groups_may_call_what_they_know_and_batches_are_cut_by_data_parallel_rank(
    worker: type, on_all: str, by_rows: str
) -> None:
    methods = registered_methods(worker)
    assert all(methods[name].dispatch_mode is Dispatch.ONE_TO_ALL for name in on_all.split())
    # DP_COMPUTE_PROTO over the ranks that hold different rows: those that share a sequence or a layer get the same.
    assert all(methods[name].dispatch_mode.batch_ranks is not None for name in by_rows.split())


def test_an_engine_is_found_by_name_and_mode() -> None:
    from dovetail.rollout.sglang import SGLangRollout

    assert get_rollout_class("sglang", "sync") is SGLangRollout
    native = get_rollout_class("native")
    assert native is get_engine_class("native")
    assert issubclass(native, RolloutEngine)
    with pytest.raises(ValueError, match="is no mode; choose from sync, async, server"):
        get_rollout_class("native", "spmd")
    with pytest.raises(ValueError, match="choose from native, vllm, sglang"):
        get_rollout_class("trt", "sync")

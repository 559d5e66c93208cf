"""LoRA adapters sent as they are (`model.lora_merge=False`): the engine keeps the base and gets low ranks each step."""

from __future__ import annotations

from dovetail.backends.base import TrainBackend
from dovetail.config.model import ModelConfig
from dovetail.config.rollout import RolloutConfig
from dovetail.config.root import DovetailConfig
from dovetail.weight_sync import LoraAdapter

# The sizes vLLM has kernels for.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def sends_adapter(config: DovetailConfig) -> bool:
    """Whether this run's engine applies the adapter itself. Everywhere else it is merged on the way."""
    policy = config.actor_rollout_ref
    by_itself = policy.model.uses_lora and not policy.model.lora_merge
    return by_itself and (policy.rollout.name, policy.rollout.mode) == ("vllm", "sync")


def with_base_and_adapter(rollout: RolloutConfig, model: ModelConfig) -> RolloutConfig:
    """The engine reads the base from the model's folder, as the trainer did, and has room for one adapter."""
    room = next((rank for rank in _VLLM_RANKS if rank >= model.lora_rank), None)
    if room is None:
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank={model.lora_rank} is more than the {_VLLM_RANKS[-1]} that vLLM applies "
            "as an adapter; use lora_merge=True."
        )
    wanted = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **rollout.engine_kwargs.vllm}
    kwargs = rollout.engine_kwargs.model_copy(update={"vllm": wanted})
    load_format = "auto" if rollout.load_format == "dummy" else rollout.load_format
    return rollout.model_copy(update={"engine_kwargs": kwargs, "load_format": load_format})


def adapter_of(backend: TrainBackend, model: ModelConfig) -> LoraAdapter:
    """The adapter that is being trained. Collective: every rank must take every tensor."""
    named = ((name.replace(".default.", "."), tensor) for name, tensor in backend.named_adapters())
    return LoraAdapter(model.lora_rank, model.lora_alpha, named)

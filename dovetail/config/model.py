"""`*.model.*`: which network, and how its layers compute. Roles share these keys."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.config.base import (
    HomePath,
    Section,
    inherits,
    key,
    look_up,
    read_with,
    section,
    unsupported,
    unused,
    when_is,
)
from dovetail.config.fsdp import FSDPConfig


def _is_megatron(config: Any, key: str) -> bool:
    """The policy's network has its backend in the actor's section, the others around them."""
    return (look_up(config, key, "strategy") or config.actor_rollout_ref.actor.strategy) == "megatron"


def _has_other_config(config: Any, key: str) -> bool:
    return look_up(config, key, "hf_config_path") != look_up(config, key, "path")


_FOLDER = unused("every process reads the weights from the folder", only="use_shm")
_PACKED = unused("strategy=megatron always packs sequences", _is_megatron, only="use_remove_padding")
_DECODERS = (
    _FOLDER,
    _PACKED,
    unused("strategy=megatron has override_transformer_config for it", _is_megatron, only="enable_activation_offload"),
    unsupported(
        "the config.json beside the weights is read; change fields with {section}.override_config",
        when=_has_other_config,
        only="hf_config_path",
    ),
)

_MERGED = "the engine gets merged weights; vllm with mode=sync on the trainer's devices takes adapters"
_ADAPTERS = "lora_alpha lora_dropout target_modules exclude_modules"
_LORA_ONLY = unused("{section}.lora_rank=0 trains no adapter", when_is("uses_lora", False), only=_ADAPTERS)


class FusedKernelConfig(Section):
    """Which kernel computes log-probs from hidden states."""

    impl_backend: Literal["auto", "torch", "triton"] = key(
        "auto", "torch: chunked PyTorch; triton: a Triton kernel (CUDA); auto: triton on CUDA, else torch."
    )


class ModelConfig(Section):
    """The policy network."""

    rules = (
        unused(_MERGED, when_is("actor_rollout_ref.takes_adapters", False), only="lora_merge"),
        _LORA_ONLY,
        read_with("actor_rollout_ref.model.use_fused_kernels", True, only="fused_kernel_options.*"),
        *_DECODERS,
    )

    path: HomePath = key("", "Hugging Face folder of the weights, or a name on the hub (`org/name`). Must be set.")
    hf_config_path: HomePath | None = key(None, "Folder of `config.json`. Null: `path`.")
    tokenizer_path: HomePath | None = key(None, "Folder of the tokenizer. Null: `path`.")
    custom_chat_template: str | None = key(None, "Jinja chat template. Null: the tokenizer's.")
    trust_remote_code: bool = key(False, "Run code that comes with the model.")
    external_lib: str | None = key(None, "Python module imported before the model is built.")
    override_config: dict[str, Any] = key({}, "Fields to change in the model's config.")
    use_shm: bool = key(False, "Copy the weights to shared memory once per node before loading.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass.")
    enable_activation_offload: bool = key(
        False, "Keep checkpointed activations in host memory.", was="enable_activation_offloading"
    )
    use_remove_padding: bool = key(True, "Pack sequences without padding.")
    use_fused_kernels: bool = key(False, "Log-probs and entropy without ever holding the full logits.")
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    lora_rank: int = key(0, "Rank of LoRA adapters; 0 trains all weights.", ge=0)
    lora_alpha: float = key(16, "LoRA scale is `lora_alpha / lora_rank`.", ge=0)
    lora_dropout: float = key(0.0, "Dropout before the adapters.", ge=0, lt=1)
    target_modules: str | list[str] = key("all-linear", "Modules that get an adapter.")
    exclude_modules: str | list[str] | None = key(None, "Modules that get none (names or one pattern).")
    lora_adapter_path: HomePath | None = key(
        None,
        "Adapter to continue: a folder in PEFT's format, or a name on the hub. Rank, alpha and modules are its own. "
        "Null: fresh adapters.",
    )
    lora_merge: bool = key(True, "Send merged weights to the engine instead of adapters.")

    @property
    def config_path(self) -> str:
        """Folder of `config.json`."""
        return self.hf_config_path or self.path

    @property
    def tokenizer_source(self) -> str:
        """Folder of the tokenizer."""
        return self.tokenizer_path or self.path

    @property
    def uses_lora(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


_POLICY = "actor_rollout_ref.model"


class CriticModelConfig(ModelConfig):
    """The value network: by default the policy's backbone with a value head."""

    rules = (
        unused("a value network has no vocabulary head", only="use_fused_kernels fused_kernel_options.*"),
        unused("only the policy's weights go to the engine", only="lora_merge"),
        unused("the critic reads the policy's tokens", only="tokenizer_path custom_chat_template"),
        _LORA_ONLY,
        *_DECODERS,
    )

    path: HomePath = inherits(f"{_POLICY}.path", ModelConfig)
    tokenizer_path: HomePath | None = inherits(f"{_POLICY}.tokenizer_path", ModelConfig)
    trust_remote_code: bool = inherits(f"{_POLICY}.trust_remote_code", ModelConfig)
    external_lib: str | None = inherits(f"{_POLICY}.external_lib", ModelConfig)
    override_config: dict[str, Any] = inherits(f"{_POLICY}.override_config", ModelConfig)
    use_remove_padding: bool = inherits(f"{_POLICY}.use_remove_padding", ModelConfig)


class RewardNetworkConfig(Section):
    """A sequence classifier that scores responses."""

    rules = (_FOLDER, _PACKED)

    path: HomePath | None = key(None, "Hugging Face folder of the reward model, or a name on the hub.")
    input_tokenizer: HomePath | None = inherits(
        f"{_POLICY}.path",
        ModelConfig,
        "Tokenizer that wrote the responses. Null: the network reads the policy's token ids as they are.",
        keeps_null=True,
    )
    trust_remote_code: bool = key(False, "Run code that comes with the model.")
    external_lib: str | None = inherits(f"{_POLICY}.external_lib", ModelConfig)
    override_config: dict[str, Any] = key({}, "Fields to change in the model's config.")
    use_shm: bool = key(False, "Copy the weights to shared memory once per node before loading.")
    use_remove_padding: bool = inherits(f"{_POLICY}.use_remove_padding", ModelConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)

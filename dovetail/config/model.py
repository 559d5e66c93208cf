"""`*.model.*`: which network, and how its layers compute. Roles share these keys."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dovetail.config.base import Section, inherits
from dovetail.config.fsdp import FSDPConfig
from dovetail.config.home import HomePath


class FusedKernelConfig(Section):
    """Which kernel computes log-probs from hidden states."""

    impl_backend: Literal["auto", "torch", "triton"] = Field(
        "auto", description="torch: chunked PyTorch; triton: a Triton kernel (CUDA); auto: triton on CUDA, else torch."
    )


class ModelConfig(Section):
    """The policy network."""

    path: HomePath = Field(
        "", description="Hugging Face folder of the weights, or a name on the hub (`org/name`). Must be set."
    )
    hf_config_path: HomePath | None = Field(None, description="Folder of `config.json`. Null: `path`.")
    tokenizer_path: HomePath | None = Field(None, description="Folder of the tokenizer. Null: `path`.")
    custom_chat_template: str | None = Field(None, description="Jinja chat template. Null: the tokenizer's.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")
    external_lib: str | None = Field(None, description="Python module imported before the model is built.")
    override_config: dict[str, Any] = Field({}, description="Fields to change in the model's config (free-form).")
    use_shm: bool = Field(False, description="Copy the weights to shared memory once per node before loading.")
    enable_gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward pass.")
    enable_activation_offload: bool = Field(False, description="Keep checkpointed activations in host memory.")
    use_remove_padding: bool = Field(True, description="Pack sequences without padding.")
    use_fused_kernels: bool = Field(False, description="Log-probs and entropy without ever holding the full logits.")
    fused_kernel_options: FusedKernelConfig = Field(
        FusedKernelConfig.model_construct(), description="Options of the fused head."
    )
    lora_rank: int = Field(0, ge=0, description="Rank of LoRA adapters; 0 trains all weights.")
    lora_alpha: float = Field(16, ge=0, description="LoRA scale is `lora_alpha / lora_rank`.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapters.")
    target_modules: str | list[str] = Field("all-linear", description="Modules that get an adapter.")
    exclude_modules: str | list[str] | None = Field(None, description="Modules that get none (names or one pattern).")
    lora_adapter_path: HomePath | None = Field(None, description="Adapter folder to start from. Null: fresh adapters.")
    lora_merge: bool = Field(True, description="Send merged weights to the engine instead of adapters.")

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

    path: HomePath = inherits(f"{_POLICY}.path", ModelConfig, "path", description="Folder of the weights.")
    tokenizer_path: HomePath | None = inherits(
        f"{_POLICY}.tokenizer_path", ModelConfig, "tokenizer_path", description="Folder of the tokenizer."
    )
    trust_remote_code: bool = inherits(
        f"{_POLICY}.trust_remote_code", ModelConfig, "trust_remote_code", description="Run code of the model."
    )
    external_lib: str | None = inherits(
        f"{_POLICY}.external_lib", ModelConfig, "external_lib", description="Module imported before building."
    )
    override_config: dict[str, Any] = inherits(
        f"{_POLICY}.override_config",
        ModelConfig,
        "override_config",
        description="Fields to change in the model's config (free-form).",
    )
    use_remove_padding: bool = inherits(
        f"{_POLICY}.use_remove_padding", ModelConfig, "use_remove_padding", description="Pack sequences."
    )


class RewardNetworkConfig(Section):
    """A sequence classifier that scores answers."""

    path: HomePath | None = Field(None, description="Hugging Face folder of the reward model, or a name on the hub.")
    input_tokenizer: HomePath | None = inherits(
        f"{_POLICY}.path",
        ModelConfig,
        "path",
        description="Tokenizer that wrote the responses. Null: the network reads the policy's token ids as they are.",
        keeps_null=True,
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")
    external_lib: str | None = inherits(
        f"{_POLICY}.external_lib", ModelConfig, "external_lib", description="Module imported before building."
    )
    override_config: dict[str, Any] = Field({}, description="Fields to change in the model's config (free-form).")
    use_shm: bool = Field(False, description="Copy the weights to shared memory once per node before loading.")
    use_remove_padding: bool = inherits(
        f"{_POLICY}.use_remove_padding", ModelConfig, "use_remove_padding", description="Pack sequences."
    )
    fsdp_config: FSDPConfig = Field(FSDPConfig.model_construct(), description="Sharding of the reward model.")

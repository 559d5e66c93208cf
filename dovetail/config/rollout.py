"""`actor_rollout_ref.rollout.*`: how text is generated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from dovetail.config.actor import ActorConfig
from dovetail.config.base import Section, inherits
from dovetail.config.data import DataConfig
from dovetail.config.fsdp import Dtype, full_dtype
from dovetail.config.home import HomePath
from dovetail.config.multi_turn import AgentLoopConfig, MultiTurnConfig

_ACTOR = "actor_rollout_ref.actor"


class ValSamplingConfig(Section):
    """Sampling during validation: greedy by default."""

    do_sample: bool = Field(False, description="Sample; false takes the most likely token.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus size.")
    top_k: int = Field(-1, ge=-1, description="Candidates per token; -1 for all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Smallest probability relative to the best token.")
    n: int = Field(1, ge=1, description="Responses per validation prompt.")


class EngineKwargsConfig(Section):
    """Arguments handed to the engine as they are."""

    vllm: dict[str, Any] = Field({}, description="Extra arguments of vLLM's engine (free-form).")
    sglang: dict[str, Any] = Field({}, description="Extra arguments of SGLang's engine (free-form).")


class RolloutConfig(Section):
    """Generation engine and sampling."""

    name: Literal["native", "vllm", "sglang"] = Field(
        "native",
        description="Engine: native (embedded, no extra install), vllm or sglang; with server_urls, what the servers "
        "are: vllm or sglang.",
    )
    mode: Literal["sync", "async", "server"] = Field(
        "sync", description="sync: one call per batch; async: requests per sample; server: over HTTP."
    )
    server_urls: list[str] = Field(
        [], description="With mode=server: servers that run already, here or elsewhere, as http://host:port."
    )
    server_timeout_s: float = Field(
        30.0, gt=0, description="A server that has answered nothing for so long is given up; its requests move on."
    )
    num_servers: int = Field(
        1, ge=1, description="With name=sglang, mode=server and no server_urls: servers that one engine starts here."
    )
    sglang_python: HomePath | None = Field(
        None,
        description="Python that starts those servers, where SGLang is installed apart. Null: $DOVETAIL_SGLANG_PYTHON, "
        "else the run's own.",
    )
    server_api_key_env: str | None = Field(
        None, description="Environment variable with the key that the servers ask for (Authorization: Bearer)."
    )
    n: int = Field(1, ge=1, description="Responses per training prompt (the group of GRPO).")
    do_sample: bool = Field(True, description="Sample; false takes the most likely token.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus size.")
    top_k: int = Field(-1, ge=-1, description="Candidates per token; -1 for all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Smallest probability relative to the best token.")
    repetition_penalty: float = Field(1.0, gt=0, description="Above 1 makes repeated tokens less likely.")
    ignore_eos: bool = Field(False, description="Generate on after the end-of-sequence token.")
    prompt_length: int = inherits(
        "data.max_prompt_length", DataConfig, "max_prompt_length", description="Longest prompt.", ge=1
    )
    response_length: int = inherits(
        "data.max_response_length", DataConfig, "max_response_length", description="Longest response.", ge=1
    )
    calculate_log_probs: bool = Field(False, description="Keep the engine's log-probs of the sampled tokens.")
    val_kwargs: ValSamplingConfig = Field(ValSamplingConfig.model_construct(), description="Sampling in validation.")
    nnodes: int = Field(0, ge=0, description="Nodes of generation alone; 0: on the trainer's devices.")
    n_gpus_per_node: int = Field(8, ge=1, description="Devices per such node.")
    tensor_model_parallel_size: int = Field(1, ge=1, description="Devices that share each layer of one engine.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages of one engine.")
    data_parallel_size: int = Field(1, ge=1, description="Replicas inside one engine.")
    expert_parallel_size: int = Field(1, ge=1, description="Devices that share the experts of one engine.")
    dtype: Dtype = Field("bfloat16", description="Dtype of the engine's weights.")
    quantization: str | None = Field(None, description="Quantisation of the engine's weights, e.g. fp8.")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="Dtype of the engine's KV cache: auto is that of the weights; fp8 takes half, on CUDA only."
    )
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="Share of device memory that the engine takes.")
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt + response. Null: their sum.")
    max_num_batched_tokens: int = Field(8192, ge=1, description="Tokens per engine step.")
    max_num_seqs: int = Field(256, ge=1, description="Sequences per engine step.")
    enforce_eager: bool = Field(False, description="No CUDA graphs.")
    cudagraph_capture_sizes: list[int] | None = Field(None, description="Batch sizes captured as CUDA graphs.")
    free_cache_engine: bool | None = Field(
        None,
        description="Give the KV cache back while training. Null: yes, but not where the embedded engine reads the "
        "trainer's weights on a GPU and the plan has room for both.",
    )
    enable_chunked_prefill: bool = Field(True, description="Mix prefill chunks and decoding.")
    enable_prefix_caching: bool = Field(True, description="Share the KV cache of equal prefixes.")
    limit_images: int | None = Field(None, ge=0, description="Most images per prompt. Null: the engine's limit.")
    load_format: str = Field("dummy", description="What the engine loads at start; dummy: the trainer sends weights.")
    logprobs_mode: Literal["temperature", "processed_logprobs", "raw_logprobs"] = Field(
        "temperature",
        description="Log-probs of sampled tokens: under the temperature before top-p / top-k cut anything (what the "
        "trainer recomputes), after the cut, or under temperature 1.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="Order in which requests are served.")
    disable_log_stats: bool = Field(True, description="Silence the engine's own statistics.")
    skip_tokenizer_init: bool = Field(True, description="Start the engine without a tokenizer: ids in, ids out.")
    engine_kwargs: EngineKwargsConfig = Field(EngineKwargsConfig.model_construct(), description="Engine arguments.")
    weight_sync: Literal["auto", "colocated", "broadcast", "disk"] = Field(
        "auto",
        description="How weights reach the engine; auto: colocated on shared devices, else through weights_folder "
        "where that is set, else broadcast.",
    )
    weights_folder: HomePath | None = Field(
        None, description="Folder that trainer and servers both see under this path, for weight_sync=disk."
    )
    update_weights_bucket_megabytes: int = Field(512, ge=1, description="Size of one transfer of weights, in MiB.")
    verify_start: bool = Field(
        True, description="Prove at the start that engine and trainer agree: checksums, and a greedy probe."
    )
    verify_weights: bool = Field(False, description="Prove it again after every weight update.")
    restart_engine: int | bool = Field(
        0, ge=0, description="How often a dead engine is started again before the run stops; true: once."
    )
    log_prob_micro_batch_size_per_gpu: int | None = inherits(
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        ActorConfig,
        "ppo_micro_batch_size_per_gpu",
        description="Sequences per forward on one device when old log-probs are computed.",
        ge=1,
    )
    log_prob_use_dynamic_bsz: bool = inherits(
        f"{_ACTOR}.use_dynamic_bsz", ActorConfig, "use_dynamic_bsz", description="Cut those forwards by tokens."
    )
    log_prob_max_token_len_per_gpu: int = inherits(
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        ActorConfig,
        "ppo_max_token_len_per_gpu",
        description="Tokens per such forward.",
        ge=1,
    )
    multi_turn: MultiTurnConfig = Field(MultiTurnConfig.model_construct(), description="Tools and several turns.")
    agent: AgentLoopConfig = Field(AgentLoopConfig.model_construct(), description="Loops that drive a conversation.")

    @field_validator("restart_engine", mode="before")
    @classmethod
    def _once(cls, value: Any) -> Any:
        return int(value) if isinstance(value, bool) else value

    @property
    def context_length(self) -> int:
        """Longest prompt + response that the engine must hold."""
        return self.max_model_len or self.prompt_length + self.response_length

    def reads_images(self, *, on_cuda: bool) -> bool:
        """Whether the engine takes prompts with images: the embedded one on CPU, and vLLM unless it is elsewhere."""
        return not on_cuda if self.name == "native" else self.name == "vllm" and not self.server_urls

    @property
    def weights_dtype(self) -> str | None:
        """What the engine holds matrices in; None where that is not decided here: quantised, or servers by URL."""
        return None if self.quantization or self.server_urls else full_dtype(self.dtype)

    @property
    def media_column(self) -> str:
        """What of a prompt's images goes to the engine: the processor's tensors, or the pictures themselves."""
        return "multi_modal_inputs" if self.name == "native" else "multi_modal_data"

    @property
    def engine_world_size(self) -> int:
        """Devices of one engine."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size

    @property
    def own_devices(self) -> int:
        """Devices that only generate; 0 when engine and trainer share theirs."""
        return self.nnodes * self.n_gpus_per_node

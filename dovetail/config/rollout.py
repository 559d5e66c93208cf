"""`actor_rollout_ref.rollout.*`: how text is generated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from dovetail.config.actor import ActorConfig
from dovetail.config.base import (
    HomePath,
    Section,
    all_of,
    inherits,
    key,
    look_up,
    read_with,
    section,
    unsupported,
    unused,
    when_is,
    when_not,
)
from dovetail.config.data import DataConfig
from dovetail.config.fsdp import Dtype, full_dtype
from dovetail.config.multi_turn import AgentLoopConfig, MultiTurnConfig
from dovetail.config.names import ENGINES, listed

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_SP, _PADDED = "ulysses_sequence_parallel_size", when_is("actor_rollout_ref.model.use_remove_padding", False)


_native, _not_native = when_is("name", "native"), when_not("name", "native")
_served, _not_served = when_is("served", True), when_is("served", False)
_shared_devices, _in_trainer = when_is("actor_rollout_ref.hybrid_engine", True), when_is("restarts", False)
_own_devices = when_is("actor_rollout_ref.hybrid_engine", False)
_no_folder = all_of(_served, when_is("weights_folder", None))
_native_on_cpu = all_of(_native, when_is("trainer.device", "cpu"))
_not_served_shared = all_of(_not_served, _shared_devices)
_no_server = all_of(_not_served, when_is("name", "native", "vllm"))
_starts_no_vllm = all_of(_not_served, when_not("name", "vllm"))
_NOT_NATIVE = "the native engine has no such setting; it is read by `rollout.name=vllm`"
_WHOLE_ENGINE = "each process has a whole engine; use 1 (only vllm with mode=sync is tensor parallel over processes)"
_ENGINE_SETTINGS = (
    "enable_chunked_prefill load_format scheduling_policy disable_log_stats skip_tokenizer_init "
    "cudagraph_capture_sizes expert_parallel_size"
)
_LOAD_FORMATS = dict.fromkeys(("dummy_dtensor", "dummy_megatron", "dummy_hf", "megatron", "dtensor"), "dummy")
_LOAD_FORMATS["hf"] = "auto"
_CUDA = "gpu_memory_utilization enforce_eager"
_OF_STARTED_SERVERS, _SYNC, _RAW = "num_servers sglang_python", "weight_sync", "raw_logprobs"


def _not_vllm_sync(config: Any, key: str) -> bool:
    return (look_up(config, key, "name"), look_up(config, key, "mode")) != ("vllm", "sync")


class SamplingConfig(Section):
    """How responses are drawn."""

    n: int = key(1, "Responses per prompt: the group of GRPO, or those of validation.", ge=1)
    do_sample: bool = key(True, "Sample; false takes the most likely token.")
    temperature: float = key(1.0, "Sampling temperature.", ge=0)
    top_p: float = key(1.0, "Nucleus size.", gt=0, le=1)
    top_k: int = key(-1, "Candidates per token; -1 for all.", ge=-1)
    min_p: float = key(0.0, "Smallest probability relative to the best token.", ge=0, le=1)


class ValSamplingConfig(SamplingConfig):
    """Sampling during validation: greedy by default."""

    rules = (
        unused("validation does not sample (do_sample)", when_is("do_sample", False), only="temperature top_* min_p"),
    )

    n: int = key(1, "Responses per prompt.", was="val_n", ge=1)
    do_sample: bool = key(False, "Sample; false takes the most likely token.")
    temperature: float = key(0.0, "Sampling temperature; 0 is greedy.", ge=0)


class EngineKwargsConfig(Section):
    """Arguments handed to the engine as they are."""

    rules = (
        unused(_NOT_NATIVE, _native, only="vllm"),
        read_with("actor_rollout_ref.rollout.name", "vllm", only="vllm"),
        read_with("actor_rollout_ref.rollout.name", "sglang", only="sglang"),
    )

    vllm: dict[str, Any] = key({}, "Extra arguments of vLLM's engine.")
    sglang: dict[str, Any] = key({}, "Extra arguments of SGLang's engine.")


class RolloutConfig(SamplingConfig):
    """Generation engine and sampling."""

    rules = (
        unused("no server is used without mode=server and server_urls", _not_served, only="server_* weights_folder"),
        unused(_NOT_NATIVE, _native, only=f"{_ENGINE_SETTINGS} limit_images update_weights_bucket_megabytes"),
        unused("the native engine reads it on CUDA only", _native_on_cpu, only=_CUDA),
        unused(
            "the servers of actor_rollout_ref.rollout.server_urls run already, with settings of their own",
            _served,
            only=f"{_ENGINE_SETTINGS} {_CUDA} max_num_batched_tokens max_num_seqs free_cache_engine kv_cache_dtype "
            f"enable_prefix_caching quantization engine_kwargs.*",
        ),
        read_with(".name", "vllm", only="scheduling_policy limit_images"),
        unused("only `rollout.name=sglang` starts servers", when_is("starts_servers", False), only=_OF_STARTED_SERVERS),
        unused("enforce_eager=True captures no graphs", when_is("enforce_eager", True), only="cudagraph_capture_sizes"),
        unused("the engine's log-probs are always kept", unless=(True,), only="calculate_log_probs"),
        unused("the engine runs on the trainer's devices", _shared_devices, only="n_gpus_per_node"),
        unused("the native engine takes the requests of a batch together", _native, unless=("server",), only="mode"),
        unused(_NOT_NATIVE, _native, unless=(_RAW,), only="logprobs_mode"),
        unused("the engine is in the same process", _not_served_shared, unless=("colocated",), only=_SYNC),
        unused("the engine ends with its trainer", all_of(_shared_devices, _in_trainer), only="restart_engine"),
        unsupported("it runs in the trainer's process; say what the servers are", "native", when=_served, only="name"),
        unsupported("no server is there; give rollout.server_urls or use sync", "server", when=_no_server, only="mode"),
        unsupported("no engine here applies it; use 1.0", only="repetition_penalty"),
        unsupported(_WHOLE_ENGINE, when=_not_vllm_sync, only="tensor_model_parallel_size"),
        unsupported(_WHOLE_ENGINE, only="pipeline_model_parallel_size data_parallel_size"),
        unsupported("only name=vllm quantises new weights; use null", when=_starts_no_vllm, only="quantization"),
        unsupported("only name=native can keep it; use recompute", "keep", when=_not_native, only="kv_on_update"),
        unsupported("native has them under the temperature; use temperature", _RAW, when=_native, only="logprobs_mode"),
        unsupported("servers have memory of their own; use disk or broadcast", "colocated", when=_served, only=_SYNC),
        unsupported("set {section}.weights_folder, which all servers see", "disk", when=_no_folder, only=_SYNC),
        unsupported("engines on own devices read no files; use broadcast", "disk", when=_own_devices, only=_SYNC),
    )

    name: str = key(
        "native",
        f"Engine, or with server_urls what the servers are (vllm or sglang): {listed(ENGINES)}",
        reads={"hf": "native", "sglang_async": "sglang", "vllm_async": "vllm"},
    )
    mode: Literal["sync", "async", "server"] = key(
        "sync",
        "sync: one call per batch; async: requests per sample; server: over HTTP. SGLang is servers in every mode.",
        was="sglang_rollout_mode",
        reads={"local": "sync"},
    )
    server_urls: list[str] = key([], "With mode=server: servers that run already, as http://host:port.")
    server_timeout_s: float = key(30.0, "A server silent for so long is given up; its requests move on.", gt=0)
    num_servers: int = key(1, "With name=sglang and no server_urls: servers that one engine starts here.", ge=1)
    sglang_python: HomePath | None = key(
        None,
        "Python that starts those servers, where SGLang is installed apart. Null: $DOVETAIL_SGLANG_PYTHON, "
        "else the run's own.",
    )
    server_api_key_env: str | None = key(None, "Environment variable with the servers' key (Bearer).")
    repetition_penalty: float = key(1.0, "Above 1 makes repeated tokens less likely.", gt=0)
    stop_token_ids: list[int] = key(
        [],
        "Ids at which a response ends, beside those of the model and of the chat template. With ignore_eos: at no "
        "others.",
    )
    ignore_eos: bool = key(False, "Generate on after the model's end of sequence and the chat template's end of turn.")
    prompt_length: int = inherits("data.max_prompt_length", DataConfig)
    response_length: int = inherits("data.max_response_length", DataConfig)
    calculate_log_probs: bool = key(False, "No effect: the engine's log-probs are always kept.")
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig)
    nnodes: int = key(0, "Nodes of generation alone; 0: on the trainer's devices.", ge=0)
    n_gpus_per_node: int = key(8, "Devices per such node.", ge=1)
    tensor_model_parallel_size: int = key(1, "Devices that share each layer of one engine.", ge=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages of one engine.", ge=1)
    data_parallel_size: int = key(1, "Replicas inside one engine.", ge=1)
    expert_parallel_size: int = key(1, "Devices that share the experts of one engine.", ge=1)
    dtype: Dtype = key("bfloat16", "Dtype of the engine's weights.")
    quantization: str | None = key(
        None,
        "What vLLM quantises its weights to, those of every update too: fp8 and others of its online methods. The "
        "trainer's stay as they are.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = key(
        "auto", "Dtype of the engine's KV cache: auto is that of the weights; fp8 takes half, on CUDA only."
    )
    gpu_memory_utilization: float = key(0.5, "Share of device memory that the engine takes.", gt=0, le=1)
    max_model_len: int | None = key(None, "Longest prompt + response. Null: their sum.", ge=1)
    max_num_batched_tokens: int = key(8192, "Tokens per engine step.", ge=1)
    max_num_seqs: int = key(256, "Sequences per engine step.", ge=1)
    enforce_eager: bool = key(False, "No CUDA graphs.")
    cudagraph_capture_sizes: list[int] | None = key(None, "Batch sizes captured as CUDA graphs.")
    free_cache_engine: bool | None = key(
        None,
        "Give the KV cache back while training. Null: yes, but not where the embedded engine reads the "
        "trainer's weights on a GPU and the plan has room for both.",
    )
    enable_chunked_prefill: bool = key(True, "Mix prefill chunks and decoding.")
    enable_prefix_caching: bool = key(True, "Share the KV cache of equal prefixes.")
    kv_on_update: Literal["recompute", "keep"] = key(
        "recompute",
        "KV cache of responses that run while the weights change: recompute it under the new ones, or keep it, after "
        "which their log-probs are not those of the weights.",
    )
    exact: bool = key(
        False,
        "The engine's log-prob of every token is the trainer's to the bit: both compute row by row in one order, "
        "whatever else is in the batch. Slower on both sides.",
        rules=(
            unsupported("only name=native computes so", when=_not_native),
            unsupported("megatron computes otherwise; use fsdp2", when=when_is(f"{_ACTOR}.strategy", "megatron")),
            unsupported("adapters are merged with rounding", when=when_is("actor_rollout_ref.model.uses_lora", True)),
            unsupported("fp8 products are no part of it", when=when_not(f"{_ACTOR}.fp8_recipe", None)),
            unsupported("sequence parallelism is no part of it", when=when_not(f"{_ACTOR}.{_SP}", 1)),
            unsupported("it computes packed sequences", when=_PADDED),
            unsupported("it has log-probs under the temperature", when=when_not("logprobs_mode", "temperature")),
            unsupported("a cache in fp8 rounds", when=when_is("kv_cache_dtype", "fp8")),
            unsupported("kept caches are of other weights", when=when_is("kv_on_update", "keep")),
        ),
    )
    mm_processor_kwargs: dict[str, Any] = inherits(
        "data.mm_processor_kwargs",
        DataConfig,
        "The same for vLLM, which processes images itself.",
        rules=read_with(".name", "vllm"),
    )
    fp32_lm_head: bool = key(
        False,
        "The output layer's logits stay in float32 in the engine, the policy and the reference, where weights in "
        "bfloat16 would round them to 8 bits. The fused head and Megatron's always do so in the trainer.",
        rules=(
            unsupported(
                "other engines round logits to the dtype of the weights; the trainer's own are in float32 with "
                "actor_rollout_ref.model.use_fused_kernels=True",
                when=_not_native,
            ),
            unused("{section}.exact has logits in float32", when_is("exact", True)),
        ),
    )
    limit_images: int | None = key(None, "Most images per prompt. Null: the engine's limit.", ge=0)
    load_format: str = key(
        "dummy", "What the engine loads at start; dummy: the trainer sends weights.", reads=_LOAD_FORMATS
    )
    logprobs_mode: Literal["temperature", "processed_logprobs", "raw_logprobs"] = key(
        "temperature",
        "Log-probs of sampled tokens: under the temperature before top-p / top-k cut anything (what the "
        "trainer recomputes), after the cut, or under temperature 1.",
        reads={"processed": "processed_logprobs", "raw": "raw_logprobs"},
    )
    keep_sampling_mask: bool = key(
        False,
        "Keep which tokens top_k, top_p and min_p left to choose from, and train the distribution over these, with "
        "which log-probs, entropy and KL are then taken on both sides. Needs top_k, which bounds what is kept.",
        rules=(
            unsupported("only name=native returns the masks", when=_not_native),
            unsupported(
                "megatron splits the vocabulary over ranks; use fsdp2", when=when_is(f"{_ACTOR}.strategy", "megatron")
            ),
            unsupported("turns of conversations keep no masks", when=when_is(f"{_ROLLOUT}.uses_agents", True)),
            unsupported("a teacher is compared over the whole vocabulary", when=when_is("distills", True)),
            unsupported("exact log-probs are over the whole vocabulary", when=when_is(f"{_ROLLOUT}.exact", True)),
        ),
    )
    enable_rollout_routing_replay: bool = key(
        False,
        "Return the experts that each token was sent to, for actor.router_replay.mode=R3, which sets this.",
        rules=(
            unsupported(
                f"only {_ACTOR}.router_replay.mode=R3 replays them; set that mode, or leave this key out",
                when=when_not(f"{_ACTOR}.router_replay.mode", "R3"),
            ),
            unsupported("other engines' experts are not read; use name=native, or mode=R2", when=_not_native),
            unsupported("turns of conversations keep no experts", when=when_is(f"{_ROLLOUT}.uses_agents", True)),
        ),
    )
    scheduling_policy: Literal["fcfs", "priority"] = key("fcfs", "Order in which requests are served.")
    disable_log_stats: bool = key(True, "Silence the engine's own statistics.")
    skip_tokenizer_init: bool = key(True, "Start the engine without a tokenizer: ids in, ids out.")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    weight_sync: Literal["auto", "colocated", "broadcast", "disk"] = key(
        "auto",
        "How weights reach the engine; auto: colocated on shared devices, else through weights_folder "
        "where that is set, else broadcast.",
    )
    weights_folder: HomePath | None = key(None, "Folder that trainer and servers share, for weight_sync=disk.")
    update_weights_bucket_megabytes: int = key(512, "Size of one transfer of weights, in MiB.", ge=1)
    verify_start: bool = key(True, "Prove at the start that engine and trainer agree: checksums, and a greedy probe.")
    verify_weights: bool = key(False, "Prove it again after every weight update.")
    restart_engine: int | bool = key(0, "Restarts of a dead engine before the run stops; true: once.", ge=0)
    log_prob_micro_batch_size_per_gpu: int | None = inherits(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", ActorConfig)
    log_prob_use_dynamic_bsz: bool = inherits(f"{_ACTOR}.use_dynamic_bsz", ActorConfig)
    log_prob_max_token_len_per_gpu: int = inherits(f"{_ACTOR}.ppo_max_token_len_per_gpu", ActorConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentLoopConfig = section(AgentLoopConfig)

    @field_validator("restart_engine", mode="before")
    @classmethod
    def _once(cls, value: Any) -> Any:
        return int(value) if isinstance(value, bool) else value

    @property
    def context_length(self) -> int:
        """Longest prompt + response that the engine must hold."""
        return self.max_model_len or self.prompt_length + self.response_length

    @property
    def served(self) -> bool:
        """Whether servers that run already generate."""
        return self.mode == "server" and bool(self.server_urls)

    @property
    def uses_agents(self) -> bool:
        """Whether responses are conversations that a loop drives."""
        agent = self.agent
        return bool(
            self.multi_turn.enable
            or agent.environment
            or agent.command
            or agent.agent_loop_config_path
            or agent.default_agent_loop != "single_turn_agent"
        )

    @property
    def starts_servers(self) -> bool:
        """Whether the run starts servers of its own."""
        return self.name == "sglang" and not self.served

    @property
    def restarts(self) -> bool:
        """Whether the engine is a process beside the trainer's, that can be started again."""
        return self.name == "sglang" or (self.name, self.mode) == ("vllm", "async")

    def reads_images(self, *, on_cuda: bool) -> bool:
        """Whether the engine takes prompts with images: the embedded one on CPU, and vLLM unless it is elsewhere."""
        return not on_cuda if self.name == "native" else self.name == "vllm" and not self.server_urls

    @property
    def weights_dtype(self) -> str | None:
        """What matrices are sent in; None where servers by URL decide it."""
        return None if self.server_urls else full_dtype(self.dtype)

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

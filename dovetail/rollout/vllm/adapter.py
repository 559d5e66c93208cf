"""Put a LoRA adapter into a vLLM engine in this process. vLLM reads adapters from folders; this one is in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.weight_sync import LoraAdapter, write_peft_folder
from dovetail.weight_sync.shared_memory import memory_folder


def load_adapter(llm: Any, adapter: LoraAdapter, previous: Any) -> Any:
    """The `LoRARequest` that requests must carry from now on; the one before is dropped.

    A new id each time: vLLM keeps what it has under an id, and keys its prefix cache by it.
    """
    if llm.vllm_config.lora_config is None:
        raise EngineError("this vLLM engine was started without adapters; set engine_kwargs.vllm.enable_lora=True.")
    from vllm.lora.request import LoRARequest

    number = 1 if previous is None else previous.lora_int_id + 1
    with tempfile.TemporaryDirectory(prefix="dovetail-adapter-", dir=memory_folder()) as folder:
        write_peft_folder(adapter, Path(folder))
        request = LoRARequest(f"policy-{number}", number, folder)
        if previous is not None:
            llm.remove_lora(previous.lora_int_id)
        try:
            taken = llm.add_lora(request)
        except ValueError as error:
            raise WeightUpdateError(f"vLLM does not take the adapter: {error}") from error
    if not taken:
        raise WeightUpdateError(f"vLLM did not take adapter {number}; its log says why.")
    return request

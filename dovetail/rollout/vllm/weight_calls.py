"""Weights as calls to vLLM's workers, and LoRA adapters. Whom the calls reach, and how, is the engine's affair."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from dovetail.rollout.base import EngineError, WeightUpdateError
from dovetail.weight_sync import LoraAdapter, NamedTensors, shared_memory_buckets, write_peft_folder
from dovetail.weight_sync.shared_memory import memory_folder

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A method of `WorkerExtension` and its arguments, for every worker alike."""

_IN_PLACE_BYTES = 64 * 1024**2


def loads_in_place(weights: NamedTensors, *, copy: bool = True) -> Iterator[Call]:
    """For a worker in this process. Copies, unless the tensors are the engine's own: vLLM keeps tensors until their
    layer is complete, a source reuses them."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        batch.append((name, tensor.detach().clone() if copy else tensor))
        size += tensor.nbytes
        if size >= _IN_PLACE_BYTES:
            yield "dovetail_load", (batch,)
            batch, size = [], 0
    if batch:
        yield "dovetail_load", (batch,)


def loads_through_shared_memory(weights: NamedTensors, bucket_bytes: int) -> Iterator[Call]:
    """For workers in other processes of this machine."""
    for path in shared_memory_buckets(weights, bucket_bytes):
        yield "dovetail_load_bucket", (str(path),)


def load_adapter(llm: Any, adapter: LoraAdapter, previous: Any) -> Any:
    """Put an adapter, which vLLM reads from a folder, into an engine in this process; returns the `LoRARequest` that
    requests must carry from now on. The one before is dropped.

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

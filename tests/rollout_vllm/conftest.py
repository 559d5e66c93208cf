"""Engines are started once for the whole folder: the first one costs the import of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.rollout.vllm import VLLMEngine, VLLMSettings
from tests.models.tiny import save_tiny_model

FAMILIES = ("llama_tied", "llama")


def small_settings(folder: Path | str, **overrides: Any) -> VLLMSettings:
    kwargs = {"kv_cache_memory_bytes": 64 << 20}
    defaults = {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 512, "engine_kwargs": kwargs}
    return VLLMSettings(str(folder), **{**defaults, **overrides})


def gpu_settings(folder: Path | str) -> VLLMSettings:
    return VLLMSettings(
        str(folder),
        dtype="float32",
        max_num_seqs=32,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        # In float32 vLLM's first choice is FlashInfer, which need not be installed.
        engine_kwargs={"attention_backend": "TRITON_ATTN"},
    )


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="package")
def engines(folders: dict[str, Path]) -> Iterator[dict[str, VLLMEngine]]:
    """One engine per family, with seed-0 weights at version 0."""
    built = {family: VLLMEngine(small_settings(folder)) for family, folder in folders.items()}
    yield built
    for engine in built.values():
        engine.close()


@pytest.fixture(scope="package")
def smollm2() -> Iterator[tuple[VLLMEngine, Any, Any]]:
    """The engine, transformers' model and the tokenizer, all float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dovetail.demo.smollm2 import smollm2_folder

    folder = smollm2_folder(torch.float32)
    engine = VLLMEngine(small_settings(folder, max_model_len=512, engine_kwargs={"kv_cache_memory_bytes": 256 << 20}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yield engine, model, AutoTokenizer.from_pretrained(folder)
    engine.close()

"""Generation on CPU: engines against transformers `generate` on SmolLM2-135M, 64 prompts x 128 tokens, one run.

Both sides sample at temperature 1 without stopping, on the same number of threads (OMP_NUM_THREADS, default 1). Times
are CPU seconds of the process and of those an engine starts: at one thread that is wall time on a quiet machine, and
stays comparable on a busy one. SGLang is a server in an environment of its own (DOVETAIL_SGLANG_PYTHON).
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from dovetail.demo.smollm2 import smollm2_folder
from dovetail.models.load import load_tokenizer
from dovetail.rollout import GenerationRequest, RolloutEngine, SamplingParams
from dovetail.rollout.sglang.environment import PYTHON_VARIABLE

NUM_PROMPTS = 64
NUM_TOKENS = 128
GOALS = {"native": ">= 1.5x", "vllm": "about 2x", "sglang": "none set"}


def _native(folder: Path, dtype: torch.dtype) -> RolloutEngine:
    from dovetail.rollout.native.engine import NativeEngine

    return NativeEngine(folder, dtype=dtype)


def _vllm(folder: Path, dtype: torch.dtype) -> RolloutEngine:
    from dovetail.rollout.vllm import VLLMEngine, VLLMSettings

    name = str(dtype).removeprefix("torch.")
    return VLLMEngine(VLLMSettings(str(folder), dtype=name, max_num_seqs=NUM_PROMPTS, max_model_len=512))


def _sglang(folder: Path, dtype: torch.dtype) -> RolloutEngine:
    from dovetail.rollout.sglang import SGLangRollout, SGLangSettings

    name = str(dtype).removeprefix("torch.")
    return SGLangRollout(
        SGLangSettings(str(folder), dtype=name, max_num_seqs=NUM_PROMPTS, max_model_len=512), num_servers=1
    )


# Engines measured, by name: how to build one from a folder. Those whose library is not installed are left out.
ENGINES: dict[str, Callable[[Path, torch.dtype], RolloutEngine]] = {
    "native": _native,
    "vllm": _vllm,
    "sglang": _sglang,
}


def run() -> list[dict]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = smollm2_folder(dtype)
        prompts = _prompts(folder)
        other = _cpu_seconds(lambda folder=folder, prompts=prompts, dtype=dtype: _transformers(folder, dtype, prompts))
        for name, build in ENGINES.items():
            if not _is_there(name):
                continue
            with build(folder, dtype) as engine:
                ours = _cpu_seconds(lambda engine=engine, prompts=prompts: _engine(engine, prompts))
            rows.append(
                {
                    "name": f"{name} against generate, {NUM_PROMPTS} x {NUM_TOKENS} tokens, {str(dtype)[6:]}",
                    "ours_s": ours,
                    "other_s": other,
                    "ratio": other / ours,
                    "goal": GOALS[name],
                }
            )
    return rows


def _is_there(engine: str) -> bool:
    if engine == "native" or importlib.util.find_spec(engine) is not None:
        return True
    return engine == "sglang" and PYTHON_VARIABLE in os.environ


def _prompts(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    texts = [f"What is {i} plus {3 * i + 1}? Explain step by step." for i in range(NUM_PROMPTS)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]


def _engine(engine: RolloutEngine, prompts: Sequence[Sequence[int]]) -> Callable[[], None]:
    def generate(num_tokens: int) -> None:
        results = engine.generate(
            [
                GenerationRequest(str(i), prompt, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, seed=i))
                for i, prompt in enumerate(prompts)
            ]
        )
        assert all(len(result.token_ids) == num_tokens for result in results)

    generate(2)
    return lambda: generate(NUM_TOKENS)


def _transformers(folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]]) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def generate(num_tokens: int) -> None:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=num_tokens,
            eos_token_id=[],
            pad_token_id=0,
        )
        assert out.shape[1] == width + num_tokens

    generate(2)
    return lambda: generate(NUM_TOKENS)


def _cpu_seconds(prepare: Callable[[], Callable[[], None]]) -> float:
    """Time of what `prepare` returns; models, caches and code paths are warm by then."""
    work = prepare()
    start = _spent()
    work()
    return _spent() - start


def _spent() -> float:
    """CPU seconds of this process and its children so far."""
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children]
    return time.process_time() + sum(one.user + one.system for one in times)


if __name__ == "__main__":
    from benchmarks.run import format_table

    print(format_table(run()))

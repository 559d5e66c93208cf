"""Workload W as files that every program under test reads: a model with random weights, a tokenizer, prompts.

Qwen2.5 shapes in bfloat16; one letter is one token, so a prompt of 120 letters has 120 tokens whoever reads it.
Writes nothing that is not made here.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu.shapes import VOCABULARY, qwen2_config

PROMPTS, SAMPLES, PROMPT, RESPONSE = 64, 8, 120, 512
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_workload(folder: Path, shape: str = "1.5B", *, steps: int = 8, device: str = "cuda") -> None:
    """`folder/model`, `folder/prompts.jsonl` (columns of a training run) and `folder/prompts.txt` for one run."""
    model_folder = folder / "model"
    config = qwen2_config(shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(model_folder)
    del model
    _tokenizer().save_pretrained(model_folder)
    generator = torch.Generator().manual_seed(1)
    letters = torch.randint(ord("a"), ord("z") + 1, (PROMPTS * steps, PROMPT), generator=generator)
    texts = ["".join(map(chr, row)) for row in letters.tolist()]
    (folder / "prompts.txt").write_text("\n".join(texts) + "\n")
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text in texts
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 7)\n"
    )


def spare_flashinfer() -> None:
    """On CUDA vLLM imports FlashInfer unasked; where it is not installed, neither vLLM nor TRL starts."""
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def prepare_trl() -> None:
    """TRL with vLLM in the same process expects what a launcher sets."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= launched
    spare_flashinfer()


def capture_trl_graphs(rows: int) -> None:
    """vLLM captures graphs for at most 512 rows unless told otherwise; TRL has no option for it.

    Larger batches would run without graphs. A step may also take more tokens of prompts than the 4,096 that TRL sets.
    """
    from trl.generation import vllm_generation

    wider = {"max_cudagraph_capture_size": max(512, rows), "max_num_batched_tokens": 16384}
    plain = vllm_generation.LLM
    vllm_generation.LLM = lambda **options: plain(**(options | wider))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, no merges, and names for the rest of the vocabulary, so that every id can be decoded."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = {name: number for number, name in enumerate(names)}
    words |= {f"<{number}>": number for number in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=_TEMPLATE
    )

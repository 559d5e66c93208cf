"""Packed against padded training steps of one model, forward and backward, on sequences of very different lengths.

On CUDA: Qwen2.5-1.5B's shape in bfloat16 with recomputation, 32 sequences of 64 to 2,048 tokens. On a CPU: a small
Llama and shorter sequences. Both sides give the same log-probs (checked here). Run: ``python -m benchmarks.packing``.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from dovetail.models.activations import enable_gradient_checkpointing
from dovetail.models.policy import PolicyModel

GOAL = "at least 2.5 times as fast on lengths from 64 to 2,048"


def run(repeats: int = 3) -> list[dict[str, Any]]:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    config = _qwen_1_5b() if on_gpu else _small_llama()
    rows, shortest, longest = (32, 64, 2048) if on_gpu else (12, 16, 512)
    generator = torch.Generator().manual_seed(0)
    # Log-uniform, as answers are: most are short, and one long one sets the width of a padded batch.
    lengths = (shortest * (longest / shortest) ** torch.rand(rows, generator=generator)).long()
    lengths[0] = longest
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
    ids = torch.randint(10, config.vocab_size - 10, (rows, longest), generator=generator) * mask
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    enable_gradient_checkpointing(model)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    log_probs: dict[bool, torch.Tensor] = {}
    for turn in range(repeats + 1):  # in turns; the first turn warms up and is not counted
        for packed in (True, False):
            model.set_attn_implementation("sdpa")
            policy = PolicyModel(model, use_remove_padding=packed, use_fused_kernels=True)
            taken, log_probs[packed] = _step(policy, batch, rows if packed else max(1, rows // 4))
            if turn:
                seconds[packed].append(taken)
    torch.testing.assert_close(log_probs[True], log_probs[False], atol=0.15 if on_gpu else 1e-3, rtol=0.05)
    ours_s, other_s = statistics.median(seconds[True]), statistics.median(seconds[False])
    real, padded = int(mask.sum()), mask.numel()
    name = f"packed against padded step ({real} of {padded} tokens real)"
    return [{"name": name, "ours_s": ours_s, "other_s": other_s, "ratio": other_s / ours_s, "goal": GOAL}]


def _step(policy: PolicyModel, batch: dict[str, torch.Tensor], micro: int) -> tuple[float, torch.Tensor]:
    """Padded rows go in micro-batches, as they would have to: all at once they take several times the memory."""
    policy.zero_grad(set_to_none=True)
    _synchronize()
    start = time.perf_counter()
    outs = []
    for i in range(0, batch["input_ids"].size(0), micro):
        out = policy(policy.prepare(**{k: v[i : i + micro] for k, v in batch.items()})).log_probs
        out.mean().backward()
        outs.append(out.detach())
    _synchronize()
    return time.perf_counter() - start, torch.cat(outs)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _qwen_1_5b() -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def _small_llama() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


if __name__ == "__main__":
    for result in run():
        print(result)

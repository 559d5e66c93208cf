"""The configuration and the batch of a tiny run, and what an update did, for tests of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.backends.base import RankInfo
from dovetail.config.root import DovetailConfig
from dovetail.config.tree import merge, nested
from dovetail.protocol import DataProto
from dovetail.protocol.sampling_mask import SAMPLING_MASK, make_mask
from dovetail.trainer.arrange import arrange_rows
from tests.models.tiny import save_tiny_model, tiny_config

TOLERANCE = 1e-5
"""float32 keeps 1e-7 of each of the few thousand terms (below 1) that a gradient adds up, in an order that differs
between layouts. Adam's eps of 1e-3 (see `OPTIM`) keeps updated weights as close: with 1e-8 it would blow entries whose
gradient is pure rounding noise up to full-size steps."""

PROMPT, RESPONSE = 6, 8
NUM_ROWS, MINI_BATCH = 16, 8
OPTIM = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}
FP32 = {"mixed_precision": {"param_dtype": "float32"}}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def small_model(folder: Path, family: str = "qwen2", **overrides: Any) -> Path:
    """Two layers, 4 heads of 16 over 2 KV heads, with a byte tokenizer."""
    shape: dict[str, Any] = SMALL if family == "qwen2" else {**SMALL, "head_dim": 16}
    return save_tiny_model(family, folder, **shape, **overrides)


def save_classifier(folder: Path) -> Path:
    """A sequence classifier with one score, without tokenizer."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(7)
    config = tiny_config("llama", **SMALL, head_dim=16, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def run_config(folder: Path | str, changes: Mapping[str, Any] | None = None) -> DovetailConfig:
    """float32 everywhere; `changes` are dotted keys laid over the tiny run."""
    keys: dict[str, Any] = {
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "data.train_batch_size": NUM_ROWS,
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": MINI_BATCH,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.optim": OPTIM,
        "actor_rollout_ref.actor.fsdp_config": FP32,
        "actor_rollout_ref.ref.fsdp_config": FP32,
        "actor_rollout_ref.rollout.dtype": "float32",
        "critic.optim": OPTIM,
        "critic.fsdp_config": FP32,
        "critic.model.enable_gradient_checkpointing": False,
        "reward_model.model.fsdp_config": FP32,
    }
    tree = nested(keys)
    merge(tree, nested(changes or {}))  # a section that is set twice keeps what only the first sets (the dtypes)
    return DovetailConfig(**tree)


def rollout_batch(rows: int = NUM_ROWS, *, seed: int = 1) -> DataProto:
    """Prompts of 2 to 6 tokens, responses of 1 to 8; row 3 is masked out whole, row 5 holds tokens it did not write.

    Every other prompt ends in the padding token."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (rows,), generator=generator)
    answers = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
    answers[5 % rows] = RESPONSE
    places = torch.arange(PROMPT)[None]
    prompt_mask = (places >= PROMPT - prompts[:, None]).long()
    answer_mask = (torch.arange(RESPONSE)[None] < answers[:, None]).long()
    mask = torch.cat([prompt_mask, answer_mask], dim=1)
    ids = torch.randint(3, 259, mask.shape, generator=generator) * mask
    ids[::2, PROMPT - 1] = 0  # the padding token as a word of its own, as chat templates use it
    response_mask = answer_mask.clone()
    if rows > 5:
        response_mask[3] = 0
        response_mask[5, 2:4] = 0
    noise = torch.randn(6, rows, RESPONSE, generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "response_mask": response_mask,
            "advantages": noise[0] * response_mask,
            "returns": noise[1] * response_mask,
            "values": noise[2] * response_mask,
            # Far enough from the model's own log-probs, about -6, to be clipped on some tokens and not on others.
            "noise": 0.3 * noise[3],
            "ref_noise": 0.3 * noise[4],
        },
        meta_info={"temperature": 0.9},
    )


def with_old_log_probs(batch: DataProto, log_probs: Tensor) -> DataProto:
    """`old_log_probs` and `ref_log_prob` near the model's own."""
    columns = dict(batch.tensors)
    columns["old_log_probs"] = log_probs + columns["noise"]
    columns["ref_log_prob"] = log_probs + columns["ref_noise"]
    return DataProto.from_dict(columns, dict(batch.non_tensor_batch), meta_info=dict(batch.meta_info))


def with_sampling_masks(batch: DataProto) -> DataProto:
    """As if each token that was written had been drawn from 1 to 5 ids, its own among them; a row's do not depend on
    the rows around it."""
    masks = []
    for ids, is_written in zip(
        batch.tensors["responses"].tolist(), batch.tensors["response_mask"].tolist(), strict=True
    ):
        sets = [[label, *((label + 7 * step) % 259 for step in range(1, 1 + label % 5))] for label in ids]
        kept = [own if written else [] for own, written in zip(sets, is_written, strict=True)]
        masks.append(make_mask([np.array(own, np.int32) for own in kept]))
    return batch.union(DataProto.from_dict(non_tensors={SAMPLING_MASK: masks}))


def my_rows(batch: DataProto, rank_info: RankInfo, mini_batch: int = MINI_BATCH) -> DataProto:
    """What the trainer sends to this rank: rows laid out by mini-batch, balanced by length."""
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    order = arrange_rows(lengths, rank_info.dp_size, mini_batch)
    return batch.select_idxs(torch.tensor(order)).chunk(rank_info.dp_size)[rank_info.dp_rank]


@dataclass(frozen=True)
class Updated:
    """What an update did: its metrics, and the weights after it."""

    metrics: dict[str, float]
    weights: dict[str, np.ndarray]

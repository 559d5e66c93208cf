"""Responses of a saved model to a few prompts, in this process. Scores nothing and writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail.agents.stops import stop_notice
from dovetail.config.checks import check_config, refuse_errors
from dovetail.config.effects import refuse_unsupported
from dovetail.config.plan import read_shapes
from dovetail.config.root import DovetailConfig
from dovetail.config.user_code import import_user_modules
from dovetail.data.encode import Messages, PromptEncoder
from dovetail.protocol import DataProto
from dovetail.trainer.devices import uses_gpu
from dovetail.trainer.groups import create_groups
from dovetail.trainer.model_folders import fetch_models, load_readers, refuse_broken_models
from dovetail.trainer.prompt_draws import stable_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """One response: its text without special tokens, and whether it ended or was cut at the longest length."""

    text: str
    num_tokens: int
    finish_reason: str


def generate_responses(
    config: DovetailConfig, prompts: Sequence[str | Messages], checkpoint: Path | None = None
) -> list[list[Response]]:
    """`rollout.val_kwargs.n` responses to each prompt, sampled as validation samples.

    A prompt is text (one user message, where the model has a chat template) or a list of messages. `checkpoint` is a
    `global_step_N` folder; without it the weights are those of `model.path`.
    """
    import_user_modules(config.trainer.import_modules)
    refuse_unsupported(config)
    fetch_models(config)
    refuse_broken_models(config)
    tokenizer, _ = load_readers(config)
    if (notice := stop_notice(config, tokenizer)) is not None:
        logger.warning("%s", notice.message)
    encoder = PromptEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    ids = [encoder.encode(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]
    config = _with_room_for(config, max(map(len, ids)))
    refuse_errors(check_config(config, read_shapes(config).policy))
    groups = create_groups(config, use_ray=False, use_gpu=uses_gpu(config))
    try:
        groups.init_policy(1)
        if checkpoint is not None:
            groups.actor_rollout.load_checkpoint(str(checkpoint / "actor"))
        n = config.actor_rollout_ref.rollout.val_kwargs.n
        batch = groups.rollout.generate_sequences(prompt_batch(ids, n=n, seed=config.trainer.seed, validate=True))
    finally:
        groups.shutdown()
    responses = responses_of(batch, tokenizer)
    return [responses[first : first + n] for first in range(0, len(responses), n)]


def _with_room_for(config: DovetailConfig, longest: int) -> DovetailConfig:
    """The configuration with prompts of this length; what the run was trained on does not bound them."""
    policy, data = config.actor_rollout_ref, config.data.model_copy(update={"max_prompt_length": longest})
    room = {"prompt_length": longest, "max_model_len": longest + policy.rollout.response_length}
    policy = policy.model_copy(update={"rollout": policy.rollout.model_copy(update=room)})
    return config.model_copy(update={"actor_rollout_ref": policy, "data": data})


def prompt_batch(prompt_ids: Sequence[list[int]], *, n: int, seed: int = 0, validate: bool = False) -> DataProto:
    """What an engine is asked: `n` responses to each prompt, sampled as in validation, or the most likely tokens."""
    column = np.empty(len(prompt_ids), dtype=object)
    column[:] = prompt_ids
    seeds = np.array([stable_seed(seed, f"prompt-{row}") for row in range(len(prompt_ids))])
    return DataProto.from_dict(
        {"index": torch.arange(len(prompt_ids))},
        {"raw_prompt_ids": column, "sampling_seed": seeds},
        {"n": n, "validate": validate, "do_sample": validate, "weight_version": 0},
    )


def responses_of(batch: DataProto, tokenizer: Any) -> list[Response]:
    """The responses of an engine's batch, as text."""
    ids, masks = batch.tensors["responses"], batch.tensors["response_mask"].bool()
    kept = [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]
    texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
    reasons = batch.non_tensor_batch["finish_reason"]
    return [Response(text, len(row), str(why)) for text, row, why in zip(texts, kept, reasons, strict=True)]

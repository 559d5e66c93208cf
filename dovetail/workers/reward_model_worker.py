"""`RewardModelWorker`: a sequence classifier that scores whole answers, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.backends.base import TrainBackend
from dovetail.config.model import RewardNetworkConfig
from dovetail.config.root import DovetailConfig
from dovetail.controller import Dispatch, register
from dovetail.models.load import load_tokenizer
from dovetail.protocol import DataProto
from dovetail.workers.build import build_reward
from dovetail.workers.micro_batches import MicroBatchLimit, cut, plan_micro_batches, restore
from dovetail.workers.response_columns import MODEL_INPUTS, response_width, take_columns
from dovetail.workers.training_role import TrainingRole, loaded


class RewardModelWorker(TrainingRole):
    """Scores answers. Where the policy has another tokenizer, answers are written out and read in again with the reward
    model's own tokenizer and chat template; the trained token ids are never touched."""

    def __init__(self, config: DovetailConfig) -> None:
        super().__init__(config)
        self._backend: TrainBackend | None = None
        self._tokenizers: tuple[Any, Any] | None = None

    @property
    def backend(self) -> TrainBackend:
        if self._backend is None:
            raise RuntimeError("init_model has not been called on the reward model.")
        return self._backend

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the network, and keep both tokenizers when they differ."""
        config = self.config.reward_model
        self.join_group(config.nccl_timeout)
        self._backend = build_reward(
            config.model,
            strategy=config.strategy,
            megatron=config.megatron,
            sp_size=config.ulysses_sequence_parallel_size,
            world_size=self.world_size,
            device=self.device,
        )
        self._tokenizers = _different_tokenizers(config.model)
        self.register_in_mesh("reward_model", self._backend)
        self._backend.offload(params=config.offloading.param_offload, optimizer=False)

    @register(dispatch_mode=Dispatch.mesh("reward_model", pad=True))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores`: the score of each answer on its last token, 0 elsewhere."""
        inputs = take_columns(data, MODEL_INPUTS) if self._tokenizers is None else self._read_again(data)
        config = self.config.reward_model
        # Read again, a conversation may be longer than prompt + response.
        longest = max(self.config.actor_rollout_ref.rollout.context_length, inputs.tensors["input_ids"].size(1))
        limit = MicroBatchLimit.of(
            config.use_dynamic_bsz,
            config.micro_batch_size_per_gpu or len(inputs),
            config.forward_max_token_len_per_gpu or 4 * longest,
        )
        plan = plan_micro_batches(inputs, limit, self.backend)
        with loaded(self.backend, config.offloading):
            outputs = self.backend.forward(cut(inputs, plan))
        scores = restore([output.scores for output in outputs], plan).float().cpu()
        return DataProto.from_dict({"rm_scores": _on_last_token(scores, data)})

    def _read_again(self, data: DataProto) -> DataProto:
        """The conversations in the reward model's own tokens."""
        assert self._tokenizers is not None, "only called when the tokenizers differ"
        written_by, reader = self._tokenizers
        if "raw_prompt" not in data:
            raise ValueError(
                "the reward model has another tokenizer than the policy, so it needs the prompts as chat messages, and "
                "the batch has no column raw_prompt; set data.return_raw_chat=True."
            )
        width = response_width(data)
        columns = data.tensors
        kept = columns["attention_mask"][:, -width:].bool()
        rows = []
        for index, prompt in enumerate(data.non_tensor_batch["raw_prompt"]):
            # Text: the policy has no chat template.
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            answer = written_by.decode(columns["responses"][index][kept[index]], skip_special_tokens=True)
            rows.append(_conversation_ids(reader, [*messages, {"role": "assistant", "content": answer}]))
        return _right_padded(rows, self._longest_input(rows), reader.pad_token_id or 0)

    def _longest_input(self, rows: list[list[int]]) -> int:
        """What the network reads at once: another template makes conversations longer than prompt + response."""
        context = getattr(self.backend.hf_config.get_text_config(), "max_position_embeddings", None)
        return self.config.reward_model.max_length or context or max(len(row) for row in rows)


def _different_tokenizers(model: RewardNetworkConfig) -> tuple[Any, Any] | None:
    """The tokenizer that wrote the answers and the reward model's own; None when both give the same tokens."""
    if model.input_tokenizer is None or model.path is None or model.input_tokenizer == model.path:
        return None
    written_by, reader = (
        load_tokenizer(path, trust_remote_code=model.trust_remote_code) for path in (model.input_tokenizer, model.path)
    )
    alike = written_by.get_vocab() == reader.get_vocab() and written_by.chat_template == reader.chat_template
    return None if alike else (written_by, reader)


def _conversation_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _right_padded(rows: list[list[int]], max_length: int, pad_id: int) -> DataProto:
    # The score is read at the last token, so what does not fit is dropped from the front.
    rows = [row[-max_length:] for row in rows]
    width = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
        attention_mask[index, : len(row)] = 1
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return DataProto.from_dict(
        {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids},
        {"row": np.arange(len(rows))},
    )


def _on_last_token(scores: Tensor, data: DataProto) -> Tensor:
    width = response_width(data)
    lengths = data.tensors["attention_mask"][:, -width:].sum(dim=1)
    placed = torch.zeros(len(data), width)
    # An answer without tokens has nowhere to carry its score but the first place, which its mask hides.
    placed[torch.arange(len(data)), (lengths - 1).clamp(min=0)] = scores
    return placed

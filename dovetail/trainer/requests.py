"""The columns that groups are sent, and batches made of what they answer. Sends nothing."""

from __future__ import annotations

from typing import Any

from dovetail.data.errors import DataError
from dovetail.protocol import DataProto

_PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
_ENGINE_COLUMNS = ("raw_prompt_ids", "sampling_seed")


def engine_request(prompts: DataProto, *, n: int, **sampling: Any) -> DataProto:
    """What `generate_sequences` reads: the prompts without padding, and how they are to be answered."""
    if any(prompts.non_tensor_batch.get("multi_modal_data", ())):
        raise DataError(
            "the batch has prompts with images. Engines answer them and updates take them, but a run does not bring "
            "the two together yet: answers would lack the images' placeholders. Leave the image and video columns out."
        )
    wanted = [name for name in _ENGINE_COLUMNS if name in prompts.non_tensor_batch]
    request = prompts.select(batch_keys=[], non_tensor_batch_keys=wanted)
    request.meta_info = {"n": n, **sampling}
    return request


def join_answers(prompts: DataProto, answers: DataProto, *, n: int) -> DataProto:
    """Each prompt's own columns beside its `n` answers."""
    answers.meta_info = {"temperature": answers.meta_info["temperature"]}
    # The engine wrote these three for prompt and response together.
    kept = [name for name in prompts.tensors if name not in _PROMPT_COLUMNS]
    rows = prompts.select(batch_keys=kept).repeat(n, interleave=True)
    rows.meta_info = {}
    return rows.union(answers)


def num_restarts(answers: DataProto) -> int:
    """Engines beside the trainer that died and were started again while they wrote this batch."""
    counts = answers.meta_info.get("metrics", {}).get("rollout/engine_restarts", 0)
    return int(sum(counts) if isinstance(counts, list) else counts)


def model_inputs(batch: DataProto) -> DataProto:
    """What models read: nothing else needs to travel to the workers."""
    names = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    images = [name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch]
    return batch.select(batch_keys=names, non_tensor_batch_keys=images)

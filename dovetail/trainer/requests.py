"""Select the columns that engines are sent, and join their responses with the prompts. Sends nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.data.errors import DataError
from dovetail.protocol import DataProto
from dovetail.protocol.columns import PAD_TOKEN_ID

_PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
_ENGINE_COLUMNS = ("raw_prompt_ids", "sampling_seed")
_PADDING = "padding-"


def engine_request(
    prompts: DataProto, *, n: int, media_column: str, for_agents: bool = False, **sampling: Any
) -> DataProto:
    """What `generate_sequences` reads: the prompts without padding, and the sampling settings. Agents read whole rows.

    With images also `media_column`, the form in which the engine takes them, and the prompts as the processor
    expanded them, which models read.
    """
    tensors, others = [], [name for name in _ENGINE_COLUMNS if name in prompts.non_tensor_batch]
    if for_agents:
        others = [name for name in prompts.non_tensor_batch if not name.startswith("multi_modal")]
    elif any(prompts.non_tensor_batch.get("multi_modal_data", ())):
        _check_media(prompts)
        tensors, others = ["input_ids", "attention_mask"], [*others, media_column]
    request = prompts.select(batch_keys=tensors, non_tensor_batch_keys=others)
    request.meta_info = {"n": n, **sampling}
    return request


def pad_groups(request: DataProto, divisor: int) -> DataProto:
    """As many prompts as divide over the engines, where responses become rows of any number: groups with names of
    their own, which `join_answers` leaves out."""
    missing = -len(request) % divisor
    if not missing:
        return request
    padding = request.select_idxs([row % len(request) for row in range(missing)])
    padding.non_tensor_batch["uid"] = np.array([f"{_PADDING}{row}" for row in range(missing)], dtype=object)
    padded = DataProto.concat([request, padding])
    padded.meta_info = dict(request.meta_info)
    return padded


def join_answers(prompts: DataProto, answers: DataProto, *, n: int) -> DataProto:
    """Each prompt's own columns beside its answers: `n`, or as many rows as name its `uid`, where agents wrote them.

    Raw images are dropped: models read tensors made of them.
    """
    answers.meta_info = {
        name: answers.meta_info[name] for name in ("temperature", PAD_TOKEN_ID) if name in answers.meta_info
    }
    if "uid" in answers.non_tensor_batch:
        uids = answers.non_tensor_batch["uid"]
        answers = answers.select_idxs([row for row, uid in enumerate(uids) if not str(uid).startswith(_PADDING)])
    # The engine wrote these three for prompt and response together.
    kept = [name for name in prompts.tensors if name not in _PROMPT_COLUMNS]
    others = [name for name in prompts.non_tensor_batch if name != "multi_modal_data"]
    rows = prompts.select(batch_keys=kept, non_tensor_batch_keys=others)
    if "uid" in answers.non_tensor_batch:
        place = {str(uid): row for row, uid in enumerate(prompts.non_tensor_batch["uid"])}
        rows = rows.select_idxs([place[str(uid)] for uid in answers.non_tensor_batch["uid"]])
    else:
        rows = rows.repeat(n, interleave=True)
    rows.meta_info = {}
    return rows.union(answers)


def num_restarts(answers: DataProto) -> int:
    """Engines beside the trainer that died and were started again while they wrote this batch."""
    counts = answers.meta_info.get("metrics", {}).get("rollout/engine_restarts", 0)
    return int(sum(counts) if isinstance(counts, list) else counts)


def _check_media(prompts: DataProto) -> None:
    pictures = prompts.non_tensor_batch["multi_modal_data"]
    tensors = prompts.non_tensor_batch.get("multi_modal_inputs", [None] * len(prompts))
    for row, (given, made) in enumerate(zip(pictures, tensors, strict=True)):
        if given and not made:
            raise DataError(
                f"prompt {row} of a batch has {', '.join(given)} in multi_modal_data and no tensors for the model in "
                "multi_modal_inputs; set data.return_multi_modal_inputs=True, or have your dataset write them."
            )

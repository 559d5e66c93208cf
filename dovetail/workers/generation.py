"""From a batch of prompts to requests for an engine, and from its results to the batch of answers. Holds no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import assemble
from dovetail.rollout.base import GenerationRequest, GenerationResult, derive_seed
from dovetail.rollout.request_rules import sampling_params


def requests_of(
    prompts: DataProto, rollout: RolloutConfig, *, name: str, unseeded: str | None = None
) -> list[GenerationRequest]:
    """One request per prompt, `meta_info["n"]` samples each.

    `meta_info["validate"]` takes the sampling of `rollout.val_kwargs`, `meta_info["do_sample"]=False` the most
    likely token. The column `sampling_seed` makes a prompt's answers independent of the batch and of the number
    of workers. `name` makes the requests' ids unique among those that run. Prompts without a seed get one made from
    `unseeded`: the processes of one engine must draw the same numbers.

    Images go in the column `rollout.media_column`. Beside the processor's tensors an engine is given the ids that the
    processor widened; beside pictures those of the text as written, for it widens them itself.
    """
    meta = prompts.meta_info
    sampling = sampling_params(
        rollout,
        n=int(meta.get("n", 1)),
        validate=bool(meta.get("validate", False)),
        greedy=not meta.get("do_sample", True),
    )
    reads_tensors = rollout.media_column == "multi_modal_inputs"
    ids = model_prompt_ids(prompts) if reads_tensors else prompt_token_ids(prompts)
    media = prompts.non_tensor_batch.get(rollout.media_column, [None] * len(ids))
    fresh = [None if unseeded is None else derive_seed(unseeded, index) for index in range(len(ids))]
    seeds = prompts.non_tensor_batch.get("sampling_seed", fresh)
    return [
        GenerationRequest(
            f"{name}-{index}",
            prompt,
            replace(sampling, seed=None if seed is None else int(seed)),
            multi_modal=images or None,
        )
        for index, (prompt, seed, images) in enumerate(zip(ids, seeds, media, strict=True))
    ]


def answers_of(
    prompts: DataProto,
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    rollout: RolloutConfig,
    *,
    pad_token_id: int,
) -> DataProto:
    """Responses in the order of the requests, the samples of each side by side; prompts are as models read them."""
    asked = zip(requests, model_prompt_ids(prompts), strict=True)
    prompt_ids = [ids for request, ids in asked for _ in range(request.sampling.n)]
    _check_prompts_read(prompt_ids, results)
    batch = assemble(
        prompt_ids,
        results,
        pad_token_id=pad_token_id,
        prompt_length=rollout.prompt_length,
        # No wider than the longest answer: a batch of short ones need not hold and send what nobody wrote.
        response_length=min(max((len(result.token_ids) for result in results), default=0), rollout.response_length),
    )
    batch.meta_info["temperature"] = requests[0].sampling.temperature
    return batch


def prompt_token_ids(prompts: DataProto) -> list[list[int]]:
    """The prompts without padding, as the dataset wrote them; a placeholder stands once for each image."""
    raw = prompts.non_tensor_batch.get("raw_prompt_ids")
    return _unpadded(prompts) if raw is None else [list(ids) for ids in raw]


def model_prompt_ids(prompts: DataProto) -> list[list[int]]:
    """The prompts without padding, as models read them: a placeholder for every feature of an image."""
    # Text alone is sent without padding: there the two are the same.
    return _unpadded(prompts) if "input_ids" in prompts.tensors else prompt_token_ids(prompts)


def _unpadded(prompts: DataProto) -> list[list[int]]:
    columns = prompts.tensors
    return [
        ids[mask].tolist() for ids, mask in zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)
    ]


def _check_prompts_read(prompt_ids: Sequence[Sequence[int]], results: Sequence[GenerationResult]) -> None:
    for ids, result in zip(prompt_ids, results, strict=True):
        if result.num_prompt_tokens not in (None, len(ids)):
            raise ValueError(
                f"the engine made {result.num_prompt_tokens} tokens of the prompt of request {result.request_id!r}, "
                f"and the model's processor {len(ids)}: they resize images differently. Both must have the same "
                "limits: write mm_processor_kwargs below data, and leave it out of rollout and rollout.engine_kwargs."
            )

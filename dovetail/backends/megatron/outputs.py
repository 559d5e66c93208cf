"""Between a micro-batch's padded columns and what Megatron's chunks take and give."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.backends.megatron.model import HeadCall
from dovetail.backends.megatron.packing import pack_thd
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.backends.megatron.schedule import PipelineItem
from dovetail.backends.network import wanted_tokens
from dovetail.models.backbone import align_to_tokens, predicting_positions
from dovetail.protocol import DataProto


def pipeline_item(model: MegatronModel, micro_batch: DataProto, options: ForwardOptions) -> PipelineItem:
    """The micro-batch, packed for this rank."""
    columns = micro_batch.tensors
    mask = columns["attention_mask"]
    batch = pack_thd(columns["input_ids"], mask, model.layout)
    if model.role != "policy":
        return PipelineItem(batch, None)
    if not options.adapters:
        raise ValueError("adapters=False asks for a model with LoRA, which strategy=megatron does not build.")
    wanted = predicting_positions(mask, wanted_tokens(micro_batch, options))
    rows = batch.pack(wanted).nonzero().squeeze(1)
    labels = batch.pack(columns["input_ids"].roll(-1, dims=1))
    return PipelineItem(batch, HeadCall(rows, labels[rows], options.temperature, options.entropy, options.sum_squares))


def token_output(
    model: MegatronModel, item: PipelineItem, output: Tensor, micro_batch: DataProto, options: ForwardOptions
) -> TokenOutput:
    """What the last chunk gave, in the padded layout, of all context-parallel ranks' tokens."""
    if model.role == "policy":
        assert item.head is not None, "a policy is asked for log-probs"
        rows, num_own = item.head.rows, item.batch.input_ids.size(1)

        def spread(values: Tensor) -> Tensor:
            flat = values.new_zeros(num_own).index_copy(0, rows, values)
            return align_to_tokens(item.batch.unpack(flat))

        return TokenOutput(
            log_probs=spread(output[0]),
            entropy=spread(output[1]) if options.entropy else None,
            best=spread(output[2]) if options.best else None,
            sum_squares=spread(output[3]) if options.sum_squares else None,
        )
    mask = micro_batch.tensors["attention_mask"]
    numbers = item.batch.unpack(output)
    if model.role == "value":
        return TokenOutput(values=align_to_tokens(numbers * mask))
    positions = torch.arange(mask.size(1), device=mask.device)
    last = (positions * mask.bool()).argmax(dim=1, keepdim=True)
    return TokenOutput(scores=numbers.gather(1, last).squeeze(1))


def empty_outputs(model: MegatronModel, micro_batch: DataProto, options: ForwardOptions) -> TokenOutput:
    """Of the shapes that the last stage has, for it to fill."""
    mask = micro_batch.tensors["attention_mask"]

    def tokens() -> Tensor:
        return torch.empty(mask.shape, device=mask.device)

    if model.role == "value":
        return TokenOutput(values=tokens())
    if model.role == "reward":
        return TokenOutput(scores=torch.empty(mask.size(0), device=mask.device))
    return TokenOutput(
        log_probs=tokens(),
        entropy=tokens() if options.entropy else None,
        best=tokens() if options.best else None,
        sum_squares=tokens() if options.sum_squares else None,
    )

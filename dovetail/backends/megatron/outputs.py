"""Between a micro-batch's padded columns and what Megatron's chunks take and give."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dovetail.backends.base import ForwardOptions, TokenOutput
from dovetail.backends.megatron.model import HeadCall
from dovetail.backends.megatron.packing import pack_thd
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.backends.megatron.schedule import PipelineItem
from dovetail.backends.network import teacher_of, token_lists, wanted_tokens
from dovetail.models.backbone import predicting_positions
from dovetail.models.head import TokenLists
from dovetail.protocol import DataProto
from dovetail.protocol.sampling_mask import SAMPLING_MASK

_PLAIN = ("log_probs", "entropy", "best", "sum_squares", "overlap", "divergence")
"""Outputs of one number a token."""


def pipeline_item(model: MegatronModel, micro_batch: DataProto, options: ForwardOptions) -> PipelineItem:
    """The micro-batch, packed for this rank."""
    columns = micro_batch.tensors
    mask = columns["attention_mask"]
    batch = pack_thd(columns["input_ids"], mask, model.layout)
    if model.role != "policy":
        return PipelineItem(batch, None)
    if SAMPLING_MASK in micro_batch:
        raise ValueError("sampling masks need a head that is whole on a rank; use strategy=fsdp2.")
    if not options.adapters:
        raise ValueError("adapters=False asks for a model with LoRA, which strategy=megatron does not build.")
    wanted = predicting_positions(mask, wanted_tokens(micro_batch, options))
    rows = batch.pack(wanted).nonzero().squeeze(1)

    def of_rows(column: Tensor) -> Tensor:
        """What a column has for the tokens that `rows` predict."""
        return batch.pack(column.roll(-1, dims=1))[rows]

    teacher = teacher_of(micro_batch, options)
    if teacher is not None and teacher.hidden is not None:
        teacher = replace(teacher, hidden=of_rows(teacher.hidden))
    lists = token_lists(micro_batch, options) or TokenLists()
    head = HeadCall(
        rows,
        of_rows(columns["input_ids"]),
        options.temperature,
        options.entropy,
        options.sum_squares,
        options.best,
        top_k=lists.top_k,
        top_vocab_size=lists.vocab_size,
        listed_ids=None if lists.ids is None else of_rows(lists.ids),
        need_hidden=options.hidden,
        teacher=teacher,
    )
    return PipelineItem(batch, head)


def token_output(
    model: MegatronModel, item: PipelineItem, output: Tensor, micro_batch: DataProto, options: ForwardOptions
) -> TokenOutput:
    """What the last chunk gave, in the padded layout, of all context-parallel ranks' tokens."""
    if model.role == "policy":
        assert item.head is not None, "a policy is asked for log-probs"
        rows, num_own = item.head.rows, item.batch.input_ids.size(1)

        def spread(values: Tensor) -> Tensor:
            flat = values.new_zeros(num_own, *values.shape[1:]).index_copy(0, rows, values)
            return _align_to_tokens(item.batch.unpack(flat))

        widths = _widths(model, item)
        parts = dict(zip(widths, output.split(list(widths.values())), strict=True))
        found = {
            name: spread(parts[name][0] if name in _PLAIN else parts[name].t()).to(_dtype(model, name))
            for name in _asked(widths, options)
        }
        return TokenOutput(**found)
    mask = micro_batch.tensors["attention_mask"]
    numbers = item.batch.unpack(output)
    if model.role == "value":
        return TokenOutput(values=_align_to_tokens(numbers * mask))
    positions = torch.arange(mask.size(1), device=mask.device)
    last = (positions * mask.bool()).argmax(dim=1, keepdim=True)
    return TokenOutput(scores=numbers.gather(1, last).squeeze(1))


def _align_to_tokens(values: Tensor) -> Tensor:
    """`[B, T]` made at the state before each token: value `t` moves to `t + 1`, the token it is about."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def empty_outputs(
    model: MegatronModel, item: PipelineItem, micro_batch: DataProto, options: ForwardOptions
) -> TokenOutput:
    """Of the shapes that the last stage has, for it to fill."""
    mask = micro_batch.tensors["attention_mask"]
    if model.role == "value":
        return TokenOutput(values=torch.empty(mask.shape, device=mask.device))
    if model.role == "reward":
        return TokenOutput(scores=torch.empty(mask.size(0), device=mask.device))
    widths, found = _widths(model, item), {}
    for name in _asked(widths, options):
        more = () if name in _PLAIN else (widths[name],)
        found[name] = torch.empty(*mask.shape, *more, device=mask.device, dtype=_dtype(model, name))
    return TokenOutput(**found)


def _widths(model: MegatronModel, item: PipelineItem) -> dict[str, int]:
    assert item.head is not None, "a policy is asked for log-probs"
    text = model.hf_config.get_text_config()
    return item.head.widths(text.hidden_size, text.vocab_size)


def _asked(widths: dict[str, int], options: ForwardOptions) -> list[str]:
    """The rows of the head's output that are wanted: its first four are always there."""
    left_out = {name for name in ("entropy", "best", "sum_squares") if not getattr(options, name)}
    return [name for name in widths if name not in left_out]


def _dtype(model: MegatronModel, name: str) -> torch.dtype:
    return {"top_ids": torch.int64, "hidden": model.config.params_dtype}.get(name, torch.float32)

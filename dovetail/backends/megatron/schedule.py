"""Micro-batches through Megatron's pipeline schedules, and results to every stage. Knows no loss and no optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dovetail.backends.megatron.layout import MegatronLayout
from dovetail.backends.megatron.model import HeadCall
from dovetail.backends.megatron.packing import ThdBatch
from dovetail.backends.megatron.parts import MegatronModel
from dovetail.observability.progress import note_progress


@dataclass(frozen=True)
class PipelineItem:
    """One micro-batch as the chunks take it. `is_blank`: sent along to make up a number, its result is dropped."""

    batch: ThdBatch
    head: HeadCall | None
    is_blank: bool = False


OnOutput = Callable[[int, Tensor], tuple[Tensor, Any]]
"""Called on the last stage with the number of a micro-batch and the model's output: its loss, and what to keep."""


def run_pipeline(
    model: MegatronModel, items: Sequence[PipelineItem], on_output: OnOutput, *, forward_only: bool
) -> list[Any]:
    """What `on_output` kept for each micro-batch, on the last stage; an empty list elsewhere."""
    sent = [*items, *_blanks(items, model.layout)]

    def finish(index: int, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        if sent[index].is_blank:
            loss, kept = output.sum() * 0, None
        else:
            loss, kept = on_output(index, output)
        # The number of tokens is Megatron's way to normalise; ours is in the loss already.
        return loss, torch.zeros((), dtype=torch.int, device=output.device), kept

    def step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        note_progress()
        index, item = next(iterator)
        batch = item.batch
        output = chunk(batch.input_ids, batch.position_ids, None, labels=item.head, packed_seq_params=batch.params)
        return output, partial(finish, index)

    chunks = list(model.wrapped)
    iterators = [iter(list(enumerate(sent))) for _ in chunks]
    kept = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(sent),
        seq_length=1,  # not read: lengths differ, and stages tell each other
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return kept[: len(items)]


def from_last_stage(values: Sequence[Tensor], layout: MegatronLayout) -> list[Tensor]:
    """Tensors that the last stage has, on all stages; the others pass ones of the same shape and dtype. They travel as
    one, of the widest dtype: token ids are exact in float32."""
    if layout.pp_size == 1 or not values:
        return list(values)
    flat = torch.cat([value.flatten() for value in values])
    dist.broadcast(flat, group=layout.pp_group, group_src=layout.pp_size - 1)
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]


def metrics_from_last_stage(
    metrics: Sequence[dict[str, Tensor]], layout: MegatronLayout, device: torch.device
) -> list[dict[str, Tensor]]:
    """The scalars of every micro-batch, on all stages."""
    if layout.pp_size == 1:
        return list(metrics)
    described: list[Any] = [[sorted(scalars) for scalars in metrics]]
    dist.broadcast_object_list(described, group=layout.pp_group, group_src=layout.pp_size - 1, device=device)
    names = described[0]
    if layout.is_last_stage:
        own = [
            [torch.as_tensor(scalars[name]).detach().to(device, torch.float64) for name in part]
            for scalars, part in zip(metrics, names, strict=True)
        ]
    else:
        own = [[torch.zeros((), dtype=torch.float64, device=device) for _ in part] for part in names]
    values = iter(from_last_stage([value for part in own for value in part], layout))
    return [{name: next(values) for name in part} for part in names]


def _blanks(items: Sequence[PipelineItem], layout: MegatronLayout) -> list[PipelineItem]:
    """Interleaved stages take micro-batches in groups of as many as there are stages."""
    if layout.vpp_size == 1:
        return []
    shortest = min(items, key=lambda item: item.batch.num_packed)
    blank = PipelineItem(shortest.batch, _empty_head(shortest.head), is_blank=True)
    return [blank] * (-len(items) % layout.pp_size)


def _empty_head(head: HeadCall | None) -> HeadCall | None:
    if head is None:
        return None
    ids = None if head.listed_ids is None else head.listed_ids[:0]
    hidden = None if head.teacher is None else head.teacher.hidden
    teacher = None if head.teacher is None or hidden is None else replace(head.teacher, hidden=hidden[:0])
    return replace(head, rows=head.rows[:0], labels=head.labels[:0], listed_ids=ids, teacher=teacher)

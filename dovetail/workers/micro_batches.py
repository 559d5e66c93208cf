"""Split a role's rows into micro-batches and restore the order of results. Knows nothing of losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dovetail.backends.base import TrainBackend
from dovetail.parallel.micro_batches import MicroBatchPlan, plan_by_size, plan_by_tokens
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much one device takes at once: a number of sequences, or of tokens. Exactly one is set."""

    rows: int | None = None
    tokens: int | None = None
    at_least: int = 1
    """Micro-batches that a limit by tokens must make at least."""

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(
                f"a micro-batch is limited by sequences or by tokens, not rows={self.rows} and tokens={self.tokens}; "
                "set *_micro_batch_size_per_gpu, or use_dynamic_bsz=True with *_max_token_len_per_gpu."
            )

    @classmethod
    def of(cls, use_dynamic_bsz: bool, rows: int | None, tokens: int, at_least: int = 1) -> MicroBatchLimit:
        """The limit that a section's keys describe."""
        return cls(tokens=tokens, at_least=at_least) if use_dynamic_bsz else cls(rows=rows)


def plan_micro_batches(data: DataProto, limit: MicroBatchLimit, backend: TrainBackend) -> MicroBatchPlan:
    """Which rows go together. All data-parallel ranks get the same number of micro-batches."""
    if limit.rows is not None:
        return plan_by_size(len(data), limit.rows)
    assert limit.tokens is not None, "MicroBatchLimit checks that one of its two limits is set"
    lengths = [int(length) for length in data.tensors["attention_mask"].sum(dim=-1).tolist()]
    # Ranks that share a sequence hold 1 / sp_size of it each, so together they take sp_size times the budget.
    budget = limit.tokens * backend.rank_info.sp_size
    return plan_by_tokens(
        lengths, budget, group=backend.dp_group, device=backend.device, min_num_micro_batch=limit.at_least
    )


def cut(data: DataProto, plan: MicroBatchPlan) -> list[DataProto]:
    """The micro-batches of a plan."""
    return [data.select_idxs(rows) for rows in plan.partitions]


def restore(outputs: Sequence[Tensor | None], plan: MicroBatchPlan) -> Tensor:
    """One tensor in the order of the rows that were cut."""
    parts = [output for output in outputs if output is not None]
    assert len(parts) == len(outputs), "the backend was asked for this output and must return it for every micro-batch"
    return plan.restore(parts)

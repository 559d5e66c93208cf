"""Split a role's rows into micro-batches and restore the order of results. Knows nothing of losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dovetail.backends.base import TrainBackend
from dovetail.config.actor import ActorConfig
from dovetail.config.critic import CriticConfig
from dovetail.parallel.micro_batches import MicroBatchPlan, plan_by_size, plan_by_tokens
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class MicroBatchLimit:
    """How much one device takes at once: a number of sequences, or of tokens. Exactly one is set."""

    rows: int | None = None
    tokens: int | None = None
    at_least: int = 1
    """Micro-batches that a limit by tokens must make at least."""
    by_prompt: bool = False
    """Sequences that begin with the same prompt stay together where the limit by tokens allows it."""

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(
                f"a micro-batch is limited by sequences or by tokens, not rows={self.rows} and tokens={self.tokens}; "
                "set *_micro_batch_size_per_gpu, or use_dynamic_bsz=True with *_max_token_len_per_gpu."
            )

    @classmethod
    def of(
        cls, use_dynamic_bsz: bool, rows: int | None, tokens: int, at_least: int = 1, by_prompt: bool = False
    ) -> MicroBatchLimit:
        """The limit that a section's keys describe."""
        return cls(tokens=tokens, at_least=at_least, by_prompt=by_prompt) if use_dynamic_bsz else cls(rows=rows)

    @classmethod
    def of_update(cls, section: ActorConfig | CriticConfig, rows: int, *, by_prompt: bool = False) -> MicroBatchLimit:
        """The limit of a role's updates; `rows` where its section names no number of sequences."""
        rows = section.ppo_micro_batch_size_per_gpu or rows
        tokens, at_least = section.ppo_max_token_len_per_gpu, section.min_num_micro_batch
        return cls.of(section.use_dynamic_bsz, rows, tokens, at_least, by_prompt)


def plan_micro_batches(
    data: DataProto, limit: MicroBatchLimit, backend: TrainBackend, *, rows_each: int = 1
) -> MicroBatchPlan:
    """Which rows go together: `rows_each` neighbours always do. All data-parallel ranks get as many micro-batches."""
    count = len(data) // rows_each
    if limit.rows is not None:
        plan = plan_by_size(count, max(1, limit.rows // rows_each))
    else:
        assert limit.tokens is not None, "MicroBatchLimit checks that one of its two limits is set"
        plan = plan_by_tokens(
            data.tensors["attention_mask"].sum(dim=-1).reshape(count, rows_each).sum(dim=1).tolist(),
            # Ranks that share a sequence hold 1 / sp_size of it each, so together they take sp_size times the budget.
            limit.tokens * backend.rank_info.sp_size,
            group=backend.dp_group,
            device=backend.device,
            min_num_micro_batch=limit.at_least,
            together=_rows_by_prompt(data) if limit.by_prompt else None,
        )
    if rows_each == 1:
        return plan
    return MicroBatchPlan([[rows_each * i + n for i in part for n in range(rows_each)] for part in plan.partitions])


def _rows_by_prompt(data: DataProto) -> list[list[int]]:
    """Rows that begin with the same prompt."""
    ids, width = data.tensors["input_ids"], data.tensors["responses"].shape[1]
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(ids[:, : ids.shape[1] - width].numpy()):
        groups.setdefault(prompt.tobytes(), []).append(row)
    return list(groups.values())


def cut(data: DataProto, plan: MicroBatchPlan) -> list[DataProto]:
    """The micro-batches of a plan."""
    return [data.select_idxs(rows) for rows in plan.partitions]


def restore(outputs: Sequence[Tensor | None], plan: MicroBatchPlan) -> Tensor:
    """One tensor in the order of the rows that were cut."""
    parts = [output for output in outputs if output is not None]
    assert len(parts) == len(outputs), "the backend was asked for this output and must return it for every micro-batch"
    return plan.restore(parts)

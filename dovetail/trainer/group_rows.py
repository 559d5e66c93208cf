"""Rows of groups: which draw they are of, which weights wrote their tokens, and what is left without older ones."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.protocol import DataProto
from dovetail.trainer.generators import draw_number


def split_groups(batch: DataProto) -> list[DataProto]:
    """The rows of each draw, in the order in which the draws appear."""
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows.setdefault(str(uid), []).append(row)
    return [batch.select_idxs(members) for members in rows.values()]


def within_bound(groups: Sequence[DataProto], oldest: int, *, masks_stale: bool) -> list[DataProto]:
    """Groups without tokens of weights before version `oldest`. With `masks_stale` those tokens are masked, and a group
    stays where others are left."""
    kept = []
    for rows in groups:
        first, last = version_range(rows, oldest)
        if first >= oldest:
            kept.append(rows)
        elif masks_stale and last >= oldest:
            kept.append(mask_older(rows, oldest))
    return kept


def mask_older(batch: DataProto, oldest: int) -> DataProto:
    """Tokens of weights before version `oldest` leave every loss and count."""
    kept = batch.tensors["response_mask"] * (batch.tensors["weight_version"] >= oldest)
    columns = DataProto.from_dict({"response_mask": kept.to(batch.tensors["response_mask"].dtype)})
    others = batch.select(batch_keys=[name for name in batch.tensors if name != "response_mask"])
    return others.union(columns)


def number_of(rows: DataProto) -> int:
    return draw_number(rows.non_tensor_batch["uid"][0])


def version_range(rows: DataProto, without_tokens: int) -> tuple[int, int]:
    """Of the oldest and the newest token."""
    versions = rows.tensors["weight_version"]
    sampled = versions[versions >= 0]
    return (int(sampled.min()), int(sampled.max())) if len(sampled) else (without_tokens, without_tokens)


def num_restarted(rows: DataProto) -> int:
    """Trajectories of agents that began again after a resume."""
    columns = rows.non_tensor_batch
    if "events" not in columns:
        return 0
    places = zip(columns["trajectory"], columns["events"], strict=True)
    return len({int(number) for number, events in places if any(event["kind"] == "restart" for event in events)})


def version_runs(rows: DataProto) -> list[list[int]]:
    versions = rows.tensors["weight_version"]
    values, counts = versions[versions >= 0].unique(return_counts=True)
    return [[int(value), int(count)] for value, count in zip(values, counts, strict=True)]

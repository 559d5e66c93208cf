"""Trajectories as the rows that the trainer reads, and as JSON for a checkpoint. Knows no engine and no loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from dovetail.agents.types import Segment, Task, Trajectory
from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import Response, assemble


def rows_of(
    ended: Sequence[tuple[Sequence[int], Trajectory]], rollout: RolloutConfig, *, pad_token_id: int
) -> DataProto:
    """A row for each segment, with the columns that docs/agents-design.md names ("What the trainer gets").

    Of (prompt ids, trajectory): a trajectory that ended before its first turn is a row without a response.
    """
    rows: list[dict[str, Any]] = []
    prompts: list[Sequence[int]] = []
    responses: list[Response] = []
    for prompt_ids, trajectory in ended:
        nothing = Segment(tuple(prompt_ids[: rollout.prompt_length]), Response(finish_reason="abort"))
        segments = trajectory.segments or (nothing,)
        for number, segment in enumerate(segments):
            prompts.append(segment.prompt_ids)
            # A turn may be cut and the conversation go on: only one without room counts as cut by length.
            is_cut = trajectory.outcome == "length" and number == len(segments) - 1
            whole = "stop" if segment.response.finish_reason == "length" else segment.response.finish_reason
            responses.append(replace(segment.response, finish_reason="length" if is_cut else whole))
            row = {
                "uid": trajectory.task.uid,
                "trajectory": trajectory.task.sample,
                "segment": number,
                "outcome": trajectory.outcome,
                "num_turns": trajectory.num_turns,
                "agent_reward": float("nan") if trajectory.reward is None else trajectory.reward,
                "turn_rewards": [list(reward) for reward in segment.turn_rewards],
                "messages": [dict(message) for message in trajectory.messages],
                "events": [dict(event) for event in trajectory.events],
            }
            rows.append(row)
    batch = assemble(prompts, responses, pad_token_id=pad_token_id, prompt_length=rollout.prompt_length)
    dtypes: dict[str, Any] = {"trajectory": np.int64, "segment": np.int64, "num_turns": np.int64, "agent_reward": float}
    arrays = {name: _column([row[name] for row in rows], dtypes.get(name, object)) for name in rows[0]}
    return batch.union(DataProto.from_dict(non_tensors=arrays))


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """All but the task, which is the row's own."""
    return {name: value for name, value in asdict(replace(trajectory, task=Task([]))).items() if name != "task"}


def trajectory_from_json(value: dict[str, Any], task: Task) -> Trajectory:
    def response(lists: dict[str, Any]) -> Response:
        fields: dict[str, Any] = {name: tuple(part) if isinstance(part, list) else part for name, part in lists.items()}
        return Response(**fields)

    segments = tuple(
        Segment(
            tuple(segment["prompt_ids"]),
            response(segment["response"]),
            tuple((int(position), float(reward)) for position, reward in segment["turn_rewards"]),
        )
        for segment in value["segments"]
    )
    fields: dict[str, Any] = {name: tuple(part) if isinstance(part, list) else part for name, part in value.items()}
    fields["segments"] = segments
    return Trajectory(task, **fields)


def states_as_rows(rows: Sequence[tuple[str, int, dict[str, Any]]]) -> DataProto | None:
    """States of trajectories as a batch that can be sent and saved; `weight_version` says how many tokens they have."""
    if not rows:
        return None
    nodes = [state.get("session", {}).get("nodes", ()) for _, _, state in rows]
    versions = [[version for node in own for version in node["weight_versions"]] for own in nodes]
    padded = torch.full((len(rows), max(1, *map(len, versions))), -1, dtype=torch.int32)
    for row, own in enumerate(versions):
        padded[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
    return DataProto.from_dict(
        {"weight_version": padded},
        {
            "uid": np.array([uid for uid, _, _ in rows], dtype=object),
            "sample_index": np.array([index for _, index, _ in rows], dtype=np.int64),
            "state": np.array([json.dumps(state, default=_refuse) for _, _, state in rows], dtype=object),
        },
    )


def _refuse(value: object) -> str:
    kind = type(value).__name__
    raise TypeError(
        f"{value!r:.80} in the record of a trajectory is no JSON but {kind}; state() must return JSON values."
    )


def states_by_uid(snapshot: DataProto | None) -> dict[str, dict[int, Any]]:
    """The inverse of `states_as_rows`."""
    states: dict[str, dict[int, Any]] = {}
    if snapshot is not None:
        others = snapshot.non_tensor_batch
        for uid, index, state in zip(others["uid"], others["sample_index"], others["state"], strict=True):
            states.setdefault(str(uid), {})[int(index)] = json.loads(state)
    return states


def _column(values: list[Any], dtype: Any) -> np.ndarray:
    """One entry for each row, also where the entries are lists."""
    column = np.empty(len(values), dtype=dtype)
    for row, value in enumerate(values):
        column[row] = value
    return column

"""`GroupStream`: prompts come at any time, whole groups of responses leave as they finish. Over one engine's stream.

A group is a prompt with its `n` responses, known by its `uid`. What is unfinished can be read at any moment
(`snapshot`) and continued elsewhere (`start`): tokens, log-probs and weight versions are kept, nothing is sampled
again. Knows no trainer and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dovetail.agents.stream import Agents, AgentStream
from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.protocol.columns import as_array
from dovetail.protocol.routed_experts import ROUTED_EXPERTS
from dovetail.protocol.sampling_mask import SAMPLING_MASK, cut_mask, join_masks
from dovetail.rollout.assemble import NO_VERSION, assemble
from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine, SamplingParams
from dovetail.rollout.open_groups import OpenGroups
from dovetail.workers.generation import answers_of, requests_of


@dataclass(eq=False)
class _Group:
    uid: str
    prompt: DataProto
    request: GenerationRequest
    """All `n` samples; the requests that run may ask for one sample, and have tokens of it in their prompt."""
    results: dict[int, GenerationResult] = field(default_factory=dict)
    begun: dict[int, GenerationResult] = field(default_factory=dict)
    """What samples that were continued had before."""

    @property
    def is_finished(self) -> bool:
        return len(self.results) == self.request.sampling.n


class GroupStream(OpenGroups[_Group, list[GenerationRequest]]):
    """Groups of single responses. What is held are the requests that the engine has not been given yet."""

    def __init__(self, engine: RolloutEngine, rollout: RolloutConfig, *, pad_token_id: int) -> None:
        super().__init__(engine)
        self._rollout = rollout
        self._pad_token_id = pad_token_id
        self._by_request: dict[str, _Group] = {}
        self._num_requests = 0

    def start(self, prompts: DataProto, snapshot: DataProto | None = None) -> None:
        """Add groups; `requests_of` says what the columns and `meta_info` mean. Every row needs a `uid`.

        With a `snapshot`, go on from what it has of these prompts.
        """
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        for name, column in (("keep_sampling_mask", SAMPLING_MASK), ("enable_rollout_routing_replay", ROUTED_EXPERTS)):
            value = getattr(self._rollout, name)
            if snapshot is not None and (column in snapshot) != value:
                raise ValueError(
                    f"rollout.{name}={value}, and the checkpoint's unfinished responses were begun with the other "
                    "value; continue with that, or start from its exported model."
                )
        known = _results_by_uid(snapshot, set(uids))
        groups: list[_Group] = []
        requests: dict[str, list[GenerationRequest]] = {}
        for row, request in enumerate(requests_of(prompts, self._rollout, name="draw")):
            uid = uids[row]
            group = _Group(uid, prompts.slice(row, row + 1), request)
            groups.append(group)
            if uid not in known:
                requests[uid] = [request]
                continue
            for index, before in known[uid].items():
                if index < request.sampling.n:  # a run may go on with fewer responses, and with shorter ones
                    result = _cut(before, request.sampling)
                    (group.begun if result.finish_reason == "running" else group.results)[index] = result
            unfinished = [index for index in range(request.sampling.n) if index not in group.results]
            requests[uid] = [_continued(group, index) for index in unfinished]
        self._add(groups, requests)
        with self._changed:
            self._move_finished(groups)

    def take(self) -> DataProto | None:
        """The groups that have finished since the last call, in the order in which they did; None: none has."""
        groups = self._take_finished()
        if not groups:
            return None
        prompts = DataProto.concat([group.prompt for group in groups])
        results = [group.results[index] for group in groups for index in range(group.request.sampling.n)]
        batch = answers_of(
            prompts, [group.request for group in groups], results, self._rollout, pad_token_id=self._pad_token_id
        )
        uids = [group.uid for group in groups for _ in range(group.request.sampling.n)]
        return batch.union(DataProto.from_dict(non_tensors={"uid": np.array(uids, dtype=object)}))

    def snapshot(self) -> DataProto | None:
        """What groups that were not taken have so far, a row for each sample that has any token; they go on."""
        partial = {(result.request_id, result.sample_index): result for result in self._stream.partial()}
        rows: list[tuple[str, GenerationResult]] = []
        with self._changed:
            self._receive()  # what has finished since `partial` or before it
            # A checkpoint holds also what has finished since the last `take`.
            for group in [*self._groups.values(), *self._finished]:
                running = {
                    index: _joined(group.begun.get(index), result)
                    for (name, index), result in partial.items()
                    if self._by_request.get(name) is group
                }
                rows += [(group.uid, result) for result in (group.begun | running | group.results).values()]
        return _as_rows(rows, self._pad_token_id, keep_experts=self._rollout.enable_rollout_routing_replay)

    def _has_begun(self, group: _Group) -> bool:
        return bool(group.begun or group.results)

    def _begin(self, uids: Sequence[str]) -> None:
        named = []
        with self._changed:
            for uid in uids:
                for request in self._held.pop(uid, ()):
                    self._num_requests += 1
                    name = f"{uid}/{self._num_requests}"
                    self._by_request[name] = self._groups[uid]
                    named.append(replace(request, request_id=name))
        if named:
            self._stream.submit(*named)
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, results: Sequence[GenerationResult]) -> None:
        groups = []
        for result in results:
            group = self._by_request.get(result.request_id)
            if group is not None:
                group.results[result.sample_index] = _joined(group.begun.get(result.sample_index), result)
                groups.append(group)
        self._move_finished(groups)
        self._forget([group for group in groups if group.is_finished])

    def _cancel(self, groups: Sequence[_Group]) -> None:
        with self._changed:
            names = self._forget(groups)
        self._stream.abort(names)

    def _forget(self, groups: Sequence[_Group]) -> set[str]:
        """Take the requests of these groups out of the table; returns their names. The lock is held."""
        gone = {group.uid for group in groups}
        names = {name for name, group in self._by_request.items() if group.uid in gone} if gone else set()
        for name in names:
            del self._by_request[name]
        return names


def open_groups(
    engine: RolloutEngine, rollout: RolloutConfig, agents: Agents | None, *, pad_token_id: int
) -> OpenGroups[Any, Any]:
    """Groups of conversations where agents write them, else of single responses."""
    if agents is None:
        return GroupStream(engine, rollout, pad_token_id=pad_token_id)
    return AgentStream(engine, rollout, agents, pad_token_id=pad_token_id)


def own_rows(prompts: DataProto, engine: int) -> DataProto:
    """The prompts whose column `engine` is this number."""
    return prompts.select_idxs(np.flatnonzero(prompts.non_tensor_batch["engine"] == engine))


def _cut(result: GenerationResult, sampling: SamplingParams) -> GenerationResult:
    """The response, ended where it has more tokens than it may have now, or runs and may have no more.

    With `keep_experts` one that runs has its last token written again: the engine that ends it says its experts.
    """
    runs = result.finish_reason == "running"
    goes_on = runs and sampling.keep_experts
    length = sampling.max_new_tokens - goes_on
    if len(result.token_ids) + (runs and not goes_on) <= length:
        return result
    return replace(
        result,
        token_ids=result.token_ids[:length],
        log_probs=result.log_probs[:length],
        weight_versions=result.weight_versions[:length],
        finish_reason="running" if goes_on else "length",
        sampling_mask=cut_mask(result.sampling_mask, length),
    )


def _continued(group: _Group, index: int) -> GenerationRequest:
    """One sample of a group, alone; its seed and number stay, so it draws the numbers it would have drawn."""
    begun, request = group.begun.get(index), group.request
    tokens = [] if begun is None else begun.token_ids
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *tokens],
        sampling=replace(request.sampling, n=1, max_new_tokens=request.sampling.max_new_tokens - len(tokens)),
        sample_index=index,
    )


def _joined(begun: GenerationResult | None, result: GenerationResult) -> GenerationResult:
    if begun is None:
        return result
    return replace(
        result,
        token_ids=[*begun.token_ids, *result.token_ids],
        log_probs=[*begun.log_probs, *result.log_probs],
        weight_versions=[*begun.weight_versions, *result.weight_versions],
        num_prompt_tokens=None,
        sampling_mask=join_masks(begun.sampling_mask, len(begun.token_ids), result.sampling_mask),
    )


def _as_rows(rows: list[tuple[str, GenerationResult]], pad_token_id: int, *, keep_experts: bool) -> DataProto | None:
    """Responses of samples as a batch that can be sent and saved; prompts are left out. With `keep_experts` it has
    the column also where no response has finished, as the snapshots of other engines may have it."""
    if not rows:
        return None
    batch = assemble([[] for _ in rows], [result for _, result in rows], pad_token_id=pad_token_id, prompt_length=1)
    kept = batch.select(batch_keys=["responses", "response_mask", "rollout_log_probs", "weight_version"])
    names = np.array([uid for uid, _ in rows], dtype=object)
    indices = np.array([result.sample_index for _, result in rows], dtype=np.int64)
    if keep_experts:
        kept.non_tensor_batch[ROUTED_EXPERTS] = as_array([result.routed_experts for _, result in rows])
    return kept.union(DataProto.from_dict(non_tensors={"uid": names, "sample_index": indices}))


def _results_by_uid(snapshot: DataProto | None, uids: set[str]) -> dict[str, dict[int, GenerationResult]]:
    """The inverse of `_as_rows`, for these groups."""
    results: dict[str, dict[int, GenerationResult]] = {}
    if snapshot is None:
        return results
    columns, others = snapshot.tensors, snapshot.non_tensor_batch
    for row, uid in enumerate(map(str, others["uid"])):
        if uid not in uids:
            continue
        length = int((columns["weight_version"][row] != NO_VERSION).sum())
        index = int(others["sample_index"][row])
        results.setdefault(uid, {})[index] = GenerationResult(
            request_id=uid,
            sample_index=index,
            token_ids=columns["responses"][row, :length].tolist(),
            log_probs=columns["rollout_log_probs"][row, :length].tolist(),
            finish_reason=others["finish_reason"][row],
            weight_versions=columns["weight_version"][row, :length].tolist(),
            sampling_mask=others[SAMPLING_MASK][row] if SAMPLING_MASK in others else None,
            routed_experts=others[ROUTED_EXPERTS][row] if ROUTED_EXPERTS in others else None,
        )
    return results

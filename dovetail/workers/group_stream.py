"""`GroupStream`: prompts come at any time, whole groups of responses leave as they finish. Over one engine's stream.

A group is a prompt with its `n` responses, known by its `uid`. What is unfinished can be read at any moment
(`snapshot`) and continued elsewhere (`start`): tokens, log-probs and weight versions are kept, nothing is sampled
again. Knows no trainer and no weights.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.agents.stream import Agents, AgentStream
from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.assemble import NO_VERSION, assemble
from dovetail.rollout.base import GenerationRequest, GenerationResult, RolloutEngine
from dovetail.rollout.busy import BusySpans
from dovetail.workers.generation import answers_of, requests_of

_IDLE_S = 0.5
"""How long the generating thread waits for a result before it looks whether it should end."""


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


class GroupStream:
    """`start`, `take` and `snapshot` return at once; they may be called while another thread generates."""

    def __init__(self, engine: RolloutEngine, rollout: RolloutConfig, *, pad_token_id: int) -> None:
        self._engine = engine
        self._rollout = rollout
        self._pad_token_id = pad_token_id
        self._stream = engine.open_stream()
        self._groups: dict[str, _Group] = {}  # by uid, in the order in which they came
        self._by_request: dict[str, _Group] = {}
        self._held: dict[str, list[GenerationRequest]] = {}  # by uid: what the engine has not been given yet
        self._finished: list[_Group] = []  # in the order in which they finished
        self._changed = threading.Condition()  # of the four above
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._num_requests = 0
        self._ending = False
        self._busy = BusySpans()

    @property
    def num_running(self) -> int:
        """Groups that are not finished."""
        with self._changed:
            return len(self._groups)

    def start(self, prompts: DataProto, snapshot: DataProto | None = None) -> None:
        """Add groups; `requests_of` says what the columns and `meta_info` mean. Every row needs a `uid`.

        With a `snapshot`, go on from what it has of these prompts.
        """
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        known = _results_by_uid(snapshot, set(uids))
        groups: dict[str, _Group] = {}
        requests: dict[str, list[GenerationRequest]] = {}
        for row, request in enumerate(requests_of(prompts, self._rollout, name="draw")):
            uid = uids[row]
            group = groups[uid] = _Group(uid, prompts.slice(row, row + 1), request)
            if uid not in known:
                requests[uid] = [request]
                continue
            for index, result in known[uid].items():
                (group.begun if result.finish_reason == "running" else group.results)[index] = result
            unfinished = [index for index in range(request.sampling.n) if index not in group.results]
            requests[uid] = [_continued(group, index) for index in unfinished]
        with self._changed:
            for uid in uids:
                if uid in self._groups:
                    raise ValueError(f"group {uid!r} is already being generated; uids must be unique.")
            self._groups.update(groups)
            self._held.update(requests)
            self._receive(())
        if self._thread is not None:
            self._begin(uids)

    def take(self) -> DataProto | None:
        """The groups that have finished since the last call, in the order in which they did; None: none has."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            groups, self._finished = self._finished, []
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
            self._receive(())
            # A checkpoint holds also what has finished since the last `take`.
            for group in [*self._groups.values(), *self._finished]:
                rows += [(group.uid, result) for result in group.results.values()]
                rows += [
                    (group.uid, _joined(group.begun.get(index), result))
                    for (name, index), result in partial.items()
                    if self._by_request.get(name) is group and index not in group.results
                ]
        return _as_rows(rows, self._pad_token_id)

    def run(self, count: int, must_finish: Sequence[str] = (), *, max_begun: int | None = None) -> None:
        """Generate in this thread until `count` groups have finished, and those of `must_finish`, or nothing is left.

        What is unfinished stays in the engine, which should be paused before its memory is taken away. Beyond
        `max_begun` groups, those that have no token yet are left for later calls: new weights make the cache of every
        group that has begun be computed again.
        """
        wanted = set(must_finish)
        with self._changed:
            begun = [
                uid for uid, group in self._groups.items() if uid not in self._held or group.begun or group.results
            ]
            needed = dict.fromkeys([*begun, *(uid for uid in self._groups if uid in wanted)])
            order = list(dict.fromkeys([*needed, *self._groups]))
            room = len(order) if max_begun is None else max(max_begun, count) - len(self._finished)
        self._begin(order[: max(room, len(needed))])
        while self._groups and (len(self._finished) < count or wanted & self._groups.keys()):
            results = self._stream.results()
            with self._changed:
                self._receive(results)

    def generate_in_background(self) -> None:
        """Generate in a thread until `close`."""
        if self._thread is None:
            self._begin(list(self._held))
            self._thread = threading.Thread(target=self._generate, name="group-stream", daemon=True)
            self._thread.start()

    def take_busy(self) -> list[tuple[float, float]]:
        """When groups were being generated since the last call: start and end in seconds since the epoch."""
        with self._changed:
            return self._busy.take()

    def wait(self, timeout: float) -> None:
        """Return when a group can be taken, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished or self._failure), timeout)

    def abort(self, uids: Sequence[str]) -> None:
        """Forget these groups."""
        with self._changed:
            gone = {name for name, group in self._by_request.items() if group.uid in uids}
            for uid in uids:
                self._groups.pop(uid, None)
                self._held.pop(uid, None)
            for name in gone:
                del self._by_request[name]
            self._finished = [group for group in self._finished if group.uid not in uids]
            self._busy.note(bool(self._groups))
        self._stream.abort(gone)

    def close(self) -> None:
        """End what is running."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._stream.close()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _begin(self, uids: Sequence[str]) -> None:
        """Give the engine what it does not have yet of these groups."""
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

    def _receive(self, results: Sequence[GenerationResult]) -> None:
        """Give results to their groups and move the complete ones. The lock is held."""
        for result in results:
            group = self._by_request.get(result.request_id)
            if group is not None:
                index = result.sample_index
                group.results[index] = _joined(group.begun.get(index), result)
        complete = [group for group in self._groups.values() if group.is_finished]
        for group in complete:
            del self._groups[group.uid]
            self._held.pop(group.uid, None)
            self._finished.append(group)
        self._busy.note(bool(self._groups))
        if complete:
            done = {group.uid for group in complete}
            self._by_request = {name: group for name, group in self._by_request.items() if group.uid not in done}
            self._changed.notify_all()

    def _generate(self) -> None:
        try:
            while not self._ending:
                results = self._stream.results(timeout=_IDLE_S)
                with self._changed:
                    self._receive(results)
                    if not self._stream.num_running and not self._ending:
                        self._changed.wait(_IDLE_S)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that takes results
            with self._changed:
                self._failure = error
                self._changed.notify_all()


def open_groups(
    engine: RolloutEngine, rollout: RolloutConfig, agents: Agents | None, *, pad_token_id: int
) -> GroupStream | AgentStream:
    """Groups of conversations where agents write them, else of single responses."""
    if agents is None:
        return GroupStream(engine, rollout, pad_token_id=pad_token_id)
    return AgentStream(engine, rollout, agents, pad_token_id=pad_token_id)


def own_rows(prompts: DataProto, engine: int) -> DataProto:
    """The prompts whose column `engine` is this number."""
    return prompts.select_idxs(np.flatnonzero(prompts.non_tensor_batch["engine"] == engine))


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
    )


def _as_rows(rows: list[tuple[str, GenerationResult]], pad_token_id: int) -> DataProto | None:
    """Responses of samples as a batch that can be sent and saved; prompts are left out."""
    if not rows:
        return None
    batch = assemble([[] for _ in rows], [result for _, result in rows], pad_token_id=pad_token_id, prompt_length=1)
    kept = batch.select(batch_keys=["responses", "response_mask", "rollout_log_probs", "weight_version"])
    names = np.array([uid for uid, _ in rows], dtype=object)
    indices = np.array([result.sample_index for _, result in rows], dtype=np.int64)
    return kept.union(DataProto.from_dict(non_tensors={"uid": names, "sample_index": indices}))


def _results_by_uid(snapshot: DataProto | None, uids: set[str]) -> dict[str, dict[int, GenerationResult]]:
    """The inverse of `_as_rows`, for these groups."""
    found: dict[str, dict[int, GenerationResult]] = {}
    if snapshot is None:
        return found
    columns, others = snapshot.tensors, snapshot.non_tensor_batch
    for row, uid in enumerate(map(str, others["uid"])):
        if uid not in uids:
            continue
        length = int((columns["weight_version"][row] != NO_VERSION).sum())
        index = int(others["sample_index"][row])
        found.setdefault(uid, {})[index] = GenerationResult(
            request_id=uid,
            sample_index=index,
            token_ids=columns["responses"][row, :length].tolist(),
            log_probs=columns["rollout_log_probs"][row, :length].tolist(),
            finish_reason=others["finish_reason"][row],
            weight_versions=columns["weight_version"][row, :length].tolist(),
        )
    return found

"""Groups over a real engine: how many begin, and that waiting changes no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.config.rollout import RolloutConfig
from dovetail.protocol import DataProto
from dovetail.rollout.native.engine import NativeEngine
from dovetail.workers.group_stream import GroupStream
from tests.models.tiny import save_tiny_model

pytestmark = pytest.mark.unit
NUM_GROUPS = 6


def _prompts() -> DataProto:
    columns = {
        "raw_prompt_ids": np.array([[5, 9 + row] for row in range(NUM_GROUPS)] + [None], dtype=object)[:-1],
        "sampling_seed": np.arange(NUM_GROUPS),
        "uid": np.array([f"g{row}" for row in range(NUM_GROUPS)], dtype=object),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"n": 2})


def _stream(folder: Path, response_length: int = 12) -> GroupStream:
    settings = RolloutConfig(name="native", prompt_length=4, response_length=response_length, ignore_eos=True)
    return GroupStream(NativeEngine(str(folder), max_num_seqs=2), settings, pad_token_id=0)


def _uids(batch: DataProto | None) -> set[str]:
    return set() if batch is None else set(batch.non_tensor_batch["uid"])


def test_no_more_groups_begin_than_may_and_what_waited_draws_the_same_tokens(tmp_path: Path) -> None:
    folder = Path(save_tiny_model("llama", tmp_path, tokenizer=False))
    unlimited = _stream(folder)
    unlimited.start(_prompts())
    unlimited.run(NUM_GROUPS)
    expected = unlimited.take()
    assert expected is not None

    stream = _stream(folder)
    stream.start(_prompts())
    stream.run(1, max_begun=2)
    first = stream.take()
    assert len(_uids(first)) + len(_uids(stream.snapshot())) <= 2

    stream.run(1, ["g5"], max_begun=2)  # what must finish begins first
    second = stream.take()
    assert "g5" in _uids(second)
    assert len(_uids(first) | _uids(second) | _uids(stream.snapshot())) < NUM_GROUPS

    stream.run(NUM_GROUPS, max_begun=NUM_GROUPS)
    parts = [part for part in (first, second, stream.take()) if part is not None]
    responses = {
        (uid, number % 2): tuple(row.tolist())
        for part in parts
        for number, (uid, row) in enumerate(zip(part.non_tensor_batch["uid"], part.batch["responses"], strict=True))
    }
    rows = zip(expected.non_tensor_batch["uid"], expected.batch["responses"], strict=True)
    assert responses == {(uid, number % 2): tuple(row.tolist()) for number, (uid, row) in enumerate(rows)}
    assert stream.num_running == 0


def test_a_group_that_waits_can_be_forgotten(tmp_path: Path) -> None:
    stream = _stream(Path(save_tiny_model("llama", tmp_path, tokenizer=False)))
    stream.start(_prompts())
    stream.abort(["g1", "g4"])
    stream.run(NUM_GROUPS, max_begun=2)
    taken = _uids(stream.take())
    stream.run(NUM_GROUPS)
    assert taken | _uids(stream.take()) == {"g0", "g2", "g3", "g5"}


def test_a_snapshot_holds_what_has_finished_and_was_not_taken(tmp_path: Path) -> None:
    """A checkpoint is taken at any time; two samples run at a time, so one group is done when others have not begun."""
    stream = _stream(Path(save_tiny_model("llama", tmp_path, tokenizer=False)))
    stream.start(_prompts())
    stream.run(1)
    snapshot = stream.snapshot()
    finished = stream.take()
    assert snapshot is not None
    assert finished is not None
    assert _uids(finished) <= _uids(snapshot)

    other = _stream(tmp_path)
    other.start(_prompts(), snapshot)
    continued = other.take()
    assert continued is not None, "what was complete needs no engine"
    assert _uids(continued) == _uids(finished)
    assert continued.batch["responses"].tolist() == finished.batch["responses"].tolist()


@pytest.mark.parametrize(("n", "reason"), [(1, "length"), (2, "running")])
def test_a_snapshot_goes_on_with_fewer_or_shorter_responses(tmp_path: Path, n: int, reason: str) -> None:
    stream = _stream(Path(save_tiny_model("llama", tmp_path, tokenizer=False)))
    stream.start(_prompts())
    stream.run(1)
    everything, prompts = stream.snapshot(), _prompts().slice(0, 1)
    assert everything is not None
    snapshot = everything.select_idxs(np.flatnonzero(everything.non_tensor_batch["uid"] == "g0"))
    snapshot.non_tensor_batch["finish_reason"][:] = reason
    prompts.meta_info["n"] = n
    other = _stream(tmp_path, response_length=6)
    other.start(prompts, snapshot)
    taken = other.take()
    assert taken is not None, "what has all its tokens needs no engine"
    assert taken.tensors["responses"].tolist() == snapshot.tensors["responses"][:n, :6].tolist()
    assert set(taken.non_tensor_batch["finish_reason"]) == {"length"}


def test_a_snapshot_holds_what_the_engine_has_finished_and_nobody_was_given_yet(tmp_path: Path) -> None:
    """Else a resumed run would sample these tokens again."""
    stream = _stream(Path(save_tiny_model("llama", tmp_path, tokenizer=False)))
    stream.start(_prompts())
    stream._begin([f"g{row}" for row in range(NUM_GROUPS)])
    stream._stream.wait()  # two samples run at a time, with responses of equal length
    snapshot = stream.snapshot()
    assert snapshot is not None
    complete = snapshot.tensors["response_mask"].sum(dim=1) == 12
    assert complete.sum() == 2
    assert set(snapshot.non_tensor_batch["finish_reason"][complete.numpy()]) == {"length"}
    assert _uids(stream.take()) == {"g0"}


def test_a_snapshot_of_groups_that_the_engine_was_not_given_yet_is_the_one_they_came_from(tmp_path: Path) -> None:
    """A run that stops right after it was resumed saves again what it was resumed from."""
    stream = _stream(Path(save_tiny_model("llama", tmp_path, tokenizer=False)))
    stream.start(_prompts())
    stream._begin(["g0", "g1"])
    looks = iter([False] * 4)
    stream._stream._engine.wait(lambda: next(looks, True))  # a step for each look
    first = stream.snapshot()
    assert first is not None
    assert first.tensors["response_mask"].sum() > 0
    other = _stream(tmp_path)
    other.start(_prompts(), first)
    second = other.snapshot()
    assert second is not None
    assert second.difference(first) is None

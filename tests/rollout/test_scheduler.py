"""The native scheduler, without a model: who holds a slot, what is prefilled, what is copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
import torch

from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.native.kv_cache import SlotKVCache
from dovetail.rollout.native.scheduler import Sample, Scheduler

pytestmark = pytest.mark.unit


class Slots:
    """A cache that remembers which tokens each slot holds, so that a wrong copy shows."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.kept: dict[str, list[int]] = {}
        self.num_copied = 0

    def copy(self, source: int, target: int, length: int) -> None:
        self.tokens[target] = self.tokens.get(source, [])[:length]
        self.num_copied += source != target

    def keep(self, session: str, slot: int, tokens: Sequence[int]) -> None:
        assert self.tokens[slot][: len(tokens)] == tokens
        self.kept[session] = list(tokens)

    def restore(self, session: str, slot: int, tokens: Sequence[int]) -> int:
        pairs = zip(self.kept.pop(session, []), tokens, strict=False)
        self.tokens[slot] = [old for old, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return len(self.tokens[slot])


def _samples(group: int, prompt: list[int], n: int = 1, max_new: int = 4) -> list[Sample]:
    request = GenerationRequest(f"r{group}", prompt, SamplingParams(n=n, max_new_tokens=max_new))
    return [Sample(request, i, 0, frozenset([0]), len(prompt) + max_new, group) for i in range(n)]


def _prefill_all(scheduler: Scheduler, slots: Slots) -> int:
    count = 0
    while plan := scheduler.plan_prefill():
        assert sum(segment.length for _, segment in plan) <= scheduler.max_prefill_tokens
        for row, segment in plan:
            held = slots.tokens.get(segment.slot, [])[: segment.start]
            assert held == row.sequence[: segment.start]
            slots.tokens[segment.slot] = row.sequence[: segment.end]
            row.num_cached = segment.end
            count += segment.length
    for slot, row in enumerate(scheduler.rows):
        assert slots.tokens.get(slot, [])[: row.num_needed] == row.sequence[:-1]
    return count


def _decode(scheduler: Scheduler, slots: Slots, tokens: dict[tuple[int, int], int] | None = None) -> None:
    for slot, row in enumerate(scheduler.rows):
        slots.tokens[slot] = list(row.sequence)
        row.num_cached += 1
        row.extend([(tokens or {}).get((row.group, row.index), 9)], [-1.0], 0)


def test_a_prompt_is_prefilled_once_for_all_its_samples_even_when_they_enter_one_by_one() -> None:
    slots = Slots()
    scheduler = Scheduler(2, 100, slots)
    samples = [*_samples(1, [5, 6, 7, 8], n=5), *_samples(2, [4, 4], n=3)]
    scheduler.add(samples)
    prefilled = 0
    for _ in range(100):
        scheduler.refill()
        if not scheduler.rows and not scheduler.waiting:
            break
        prefilled += _prefill_all(scheduler, slots)
        _decode(scheduler, slots)
    assert all(sample.finish_reason == "length" and len(sample.log_probs) == 4 for sample in samples)
    assert prefilled == 3 + 1


def test_finished_rows_leave_and_the_last_row_closes_the_gap() -> None:
    slots = Slots()
    scheduler = Scheduler(4, 100, slots)
    scheduler.add([sample for group in range(4) for sample in _samples(group, [group + 1, 7], max_new=9)])
    scheduler.refill()
    _prefill_all(scheduler, slots)
    _decode(scheduler, slots, {(1, 0): 0})
    assert scheduler.refill()
    assert [row.group for row in scheduler.rows] == [0, 3, 2]
    assert not scheduler.plan_prefill()
    assert slots.tokens[1][:2] == [4, 7]


def test_several_rows_finishing_together_leave_a_dense_batch() -> None:
    slots = Slots()
    scheduler = Scheduler(6, 100, slots)
    scheduler.add([sample for group in range(6) for sample in _samples(group, [group + 1, 7, 8], max_new=9)])
    scheduler.refill()
    _prefill_all(scheduler, slots)
    _decode(scheduler, slots, {(0, 0): 0, (4, 0): 0, (5, 0): 0, (2, 0): 0})
    scheduler.refill()
    assert sorted(row.group for row in scheduler.rows) == [1, 3]
    assert _prefill_all(scheduler, slots) == 0  # also checks what each slot holds


def test_prefill_is_cut_to_the_token_budget() -> None:
    slots = Slots()
    scheduler = Scheduler(4, 5, slots)
    scheduler.add([*_samples(1, list(range(1, 13))), *_samples(2, [3, 4, 5])])
    scheduler.refill()
    assert _prefill_all(scheduler, slots) == 11 + 2


def test_after_the_cache_is_forgotten_running_samples_come_first_and_share_their_prompt_again() -> None:
    slots = Slots()
    scheduler = Scheduler(2, 100, slots)
    scheduler.add([*_samples(1, [5, 6, 7], n=2), *_samples(2, [8, 9], n=1)])
    scheduler.refill()
    _prefill_all(scheduler, slots)
    _decode(scheduler, slots)
    _decode(scheduler, slots)
    scheduler.forget_cache()
    slots.tokens.clear()
    scheduler.refill()
    assert [(row.group, row.index) for row in scheduler.rows] == [(1, 0), (1, 1)]
    # 4 tokens for the first; the second copies the 2 prompt entries and fills its own 2.
    assert _prefill_all(scheduler, slots) == 4 + 2


def test_abort_ends_running_and_waiting_samples_of_the_named_requests_only() -> None:
    slots = Slots()
    scheduler = Scheduler(1, 100, slots)
    samples = [*_samples(1, [5, 6], n=2), *_samples(2, [8, 9])]
    scheduler.add(samples)
    scheduler.refill()
    assert scheduler.abort({"r1", "unknown"}) == 2
    assert [sample.finish_reason for sample in samples] == ["abort", "abort", None]
    scheduler.refill()
    assert [row.group for row in scheduler.rows] == [2]


def _turn(session: str, prompt: list[int]) -> Sample:
    request = GenerationRequest(f"{session}{len(prompt)}", prompt, SamplingParams(max_new_tokens=2), session=session)
    return Sample(request, 0, 0, frozenset([0]), len(prompt) + 2, hash(tuple(prompt)))


def test_the_next_turn_of_a_session_takes_its_entries_back_as_far_as_the_conversation_is_the_same() -> None:
    slots = Slots()
    scheduler = Scheduler(2, 100, slots)
    first = [_turn(session, [5, 6, 7, place]) for place, session in enumerate("abc", start=1)]
    scheduler.add(first)
    for _ in range(8):
        scheduler.refill()
        _prefill_all(scheduler, slots)
        _decode(scheduler, slots)
    scheduler.refill()
    assert set(slots.kept) == set("abc")
    again, rewritten = [*first[0].sequence, 8, 8], [5, 6, 4, 4, 4]
    scheduler.add([_turn("a", again), _turn("b", rewritten)])
    scheduler.refill()
    assert _prefill_all(scheduler, slots) == 2 + 2
    assert set(slots.kept) == {"c"}


def test_another_request_with_the_same_prompt_copies_its_entries() -> None:
    slots = Slots()
    scheduler = Scheduler(4, 100, slots)
    scheduler.add([_turn("a", [5, 6, 7]), _turn("b", [5, 6, 7])])
    scheduler.refill()
    assert _prefill_all(scheduler, slots) == 2
    scheduler.add([_turn("c", [5, 6, 7])])
    scheduler.refill()
    assert _prefill_all(scheduler, slots) == 0


def test_sessions_keep_no_more_tokens_than_allowed() -> None:
    cache = SlotKVCache(max_kept_tokens=128)
    cache.reserve(2, 64)
    entry = torch.ones(1, 1, 4)
    keys, values = cache.layer(0, entry, entry)
    slot_bytes = cache.nbytes
    for number, session in enumerate("abcd", start=1):
        keys[1], values[1] = number, -number
        cache.keep(session, 1, range(64))
    assert cache.nbytes == 2 * slot_bytes
    assert cache.restore("d", 0, [*range(40), 99]) == 40
    assert keys[0, 0, :, 0].tolist() == [4.0] * 40 + [0.0] * 24
    assert values[0, 0, :40].unique().tolist() == [-4.0]
    assert sorted(cache.restore(session, 0, range(64)) for session in "abc") == [0, 0, 64]
    cache.keep("long", 1, range(129))
    assert cache.restore("long", 0, range(64)) == 0
    cache.keep("e", 1, range(64))
    cache.clear()
    assert cache.restore("e", 0, range(64)) == 0


@pytest.mark.parametrize("while_it_is_written", [True, False])
def test_a_session_that_is_over_takes_no_room_from_those_that_go_on(while_it_is_written: bool) -> None:
    slots = Slots()
    scheduler = Scheduler(2, 64, slots)
    scheduler.add([_turn("over", [5, 6, 7]), _turn("goes on", [8, 9])])
    scheduler.refill()
    _prefill_all(scheduler, slots)
    if while_it_is_written:
        scheduler.end_session("over")
        scheduler.refill()
    for row in scheduler.rows:
        row.finish_reason = "stop"
    if not while_it_is_written:
        scheduler.end_session("over")
    scheduler.refill()
    assert slots.kept == {"goes on": [8]}


def test_what_is_kept_for_a_session_that_is_over_goes() -> None:
    cache = SlotKVCache(max_kept_tokens=128)
    cache.reserve(1, 64)
    cache.layer(0, torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    before = cache.nbytes
    cache.keep("over", 0, range(64))
    cache.forget_session("over")
    cache.forget_session("never there")
    assert cache.nbytes == before
    assert cache.restore("over", 0, range(64)) == 0

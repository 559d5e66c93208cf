"""Pages by (weights, token prefix), without a model: what is found again, what is evicted, and nothing is stale."""

from __future__ import annotations

import random

import pytest
import torch

from dovetail.rollout.base import GenerationRequest, SamplingParams
from dovetail.rollout.native.cuda.pages import KVShape, PagePool
from dovetail.rollout.native.cuda.scheduler import PagedScheduler, Row
from dovetail.rollout.native.scheduler import Sample

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SIZE = 4


def pool_of(num_pages: int, expert_bytes: int = 0) -> PagePool:
    pool = PagePool(KVShape(1, 1, head_size=2, page_size=SIZE, dtype=torch.float32, expert_bytes=expert_bytes), CPU)
    pool.resize(num_pages)
    return pool


def kept(pool: PagePool, tokens: list[int]) -> list[int]:
    """Pages of a sequence that was computed and has left."""
    pages = pool.take(len(tokens) // SIZE)
    pool.publish(pool.root, tokens, pages)
    pool.release(pages)
    return pages


def test_a_prefix_is_found_as_far_as_its_blocks_are_equal() -> None:
    pool = pool_of(10)
    pages = kept(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9])
    assert pool.num_free == 10
    assert pool.match(pool.root, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9])[0] == pages[:2]
    assert pool.match(pool.root, [1, 2, 3, 4, 5, 6, 7, 0])[0] == pages[:1]
    assert pool.match(pool.root, [1, 2, 3])[0] == []
    # The same block after other tokens is another block: its keys and values are others.
    assert pool.match(pool.root, [5, 6, 7, 8])[0] == []
    middle = pool.match(pool.root, [1, 2, 3, 4])[1]
    assert pool.match(middle, [5, 6, 7, 8, 9, 9, 9, 9])[0] == pages[1:]


def test_of_two_pages_with_the_same_tokens_the_first_serves_and_the_other_is_free() -> None:
    pool = pool_of(4)
    first, second = pool.take(1), pool.take(1)
    pool.publish(pool.root, [1, 2, 3, 4], first)
    pool.publish(pool.root, [1, 2, 3, 4], second)
    pool.release(first)
    pool.release(second)
    assert pool.num_kept == 1
    assert pool.match(pool.root, [1, 2, 3, 4])[0] == first


def test_kept_pages_go_last_least_recently_used_first_and_from_the_end() -> None:
    pool = pool_of(6)
    old, new = kept(pool, [1] * 8), kept(pool, [2] * 8)
    pool.take(2)
    assert pool.num_kept == 4, "free pages are taken before kept ones"
    again, _ = pool.match(pool.root, [1] * 8)
    pool.share(again)
    pool.release(again)  # used: now the other sequence is the older one
    assert pool.take(1) == new[1:]
    assert pool.match(pool.root, [2] * 8)[0] == new[:1]
    pool.take(2)
    assert pool.match(pool.root, [2] * 8)[0] == []
    assert pool.match(pool.root, [1] * 8)[0] == old[:1]


def test_pages_in_use_are_never_evicted() -> None:
    pool = pool_of(3)
    pages = kept(pool, [1] * 8)
    pool.share(pages)
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pool.take(2)
    pool.release(pages)
    assert pool.num_free == 3


def test_after_a_change_of_weights_nothing_is_found_not_even_what_is_published_late() -> None:
    pool = pool_of(6)
    kept(pool, [1] * 8)
    running = pool.take(2)
    node = pool.publish(pool.root, [2] * 4, running[:1])
    pool.forget()
    assert (pool.num_kept, pool.num_free) == (0, 4)
    pool.publish(node, [2] * 4, running[1:])
    assert pool.match(pool.root, [1] * 8)[0] == pool.match(pool.root, [2] * 8)[0] == []
    pool.release(running)
    assert (pool.num_kept, pool.num_free) == (0, 6)


@torch.inference_mode()
def test_a_pool_that_grows_keeps_what_its_pages_hold() -> None:
    pool = pool_of(2, expert_bytes=3)
    pages = kept(pool, [1] * 8)
    pool.keys[:, pages[1]] = pool.experts[:, pages[1]] = 7
    pool.resize(5)
    assert pool.num_free == 5
    assert pool.match(pool.root, [1] * 8)[0] == pages
    assert (pool.keys[:, pages[1]] == 7).all()
    assert (pool.experts[:, pages[1]] == 7).all()
    pool.take(3)
    assert pool.num_kept == 2, "the new pages are free"


class Device:
    """Remembers what each page holds: (version, token) at each place. Writes to a published page are an error."""

    def __init__(self, num_pages: int) -> None:
        self.pool = pool_of(num_pages)
        self.scheduler = PagedScheduler(4, self.pool, steps_ahead=2)
        self.held = [[(-1, -1)] * SIZE for _ in range(num_pages)]
        self.version = 0
        self.num_prefilled = 0

    def write(self, pages: list[int], place: int, token: int) -> None:
        page = pages[place // SIZE]
        assert page not in self.pool._place_of, "others may read it"
        self.held[page][place % SIZE] = (self.version, token)

    def check(self, pages: list[int], tokens: list[int]) -> None:
        found = [self.held[pages[place // SIZE]][place % SIZE] for place in range(len(tokens))]
        assert found == [(self.version, token) for token in tokens]

    def step(self, budget: int = 11) -> None:
        scheduler = self.scheduler
        scheduler.admit()
        for source, target in scheduler.join().copies:
            self.held[target] = list(self.held[source])
        for fill in scheduler.fills():
            count = min(budget, fill.end - fill.done)
            self.check(fill.pages, fill.sequence[: fill.done])
            for place in range(fill.done, fill.done + count):
                self.write(fill.pages, place, fill.sequence[place])
            scheduler.filled(fill, count)
            budget -= count
            self.num_prefilled += count
        rows = scheduler.decodable()
        while rows and scheduler.reserve(rows, 1) is None:
            if scheduler.recomputing:
                return
            scheduler.requeue(scheduler.rows[-1:])
            rows = scheduler.decodable()
        for row in rows:
            self.decode(row)

    def decode(self, row: Row) -> None:
        sample = row.sample
        self.check(row.pages, sample.sequence[:-1])
        self.write(row.pages, row.num_cached, sample.sequence[-1])
        row.num_cached += 1
        sample.extend([sum(sample.sequence) % 3], [-1.0], self.version)
        if sample.finish_reason is not None:
            self.scheduler.leave(row)


def samples(group: int, prompt: list[int], n: int = 1, max_new: int = 4) -> list[Sample]:
    request = GenerationRequest(f"r{group}", prompt, SamplingParams(n=n, max_new_tokens=max_new))
    return [Sample(request, i, 0, frozenset(), len(prompt) + max_new, group) for i in range(n)]


def finish(device: Device, added: list[Sample]) -> int:
    """Tokens that went through prefill until these are done."""
    before = device.num_prefilled
    device.scheduler.add(added)
    for _ in range(200):
        if all(sample.finish_reason for sample in added):
            return device.num_prefilled - before
        device.step()
    raise AssertionError("no end")


def test_a_second_turn_prefills_what_is_new() -> None:
    device = Device(20)
    first = samples(1, [5] * 9)
    assert finish(device, first) == 8
    turn = [*first[0].sequence, 6, 6, 6]  # 9 + 4 + 3 tokens, of which 12 are in the cache: three pages
    assert finish(device, samples(2, turn)) == 15 - 12
    device.scheduler.forget_cache()
    device.version = 1
    assert finish(device, samples(3, turn)) == 15


def test_groups_that_start_together_prefill_what_they_share_once() -> None:
    device = Device(60)
    system = [7] * 8
    groups = [sample for g in range(4) for sample in samples(g, [*system, g, g, g], n=2)]
    assert finish(device, groups) == 8 + 4 * 2


def test_running_sequences_are_recomputed_short_ones_first() -> None:
    device = Device(60)
    device.scheduler.add([*samples(1, [5] * 30, max_new=9), *samples(2, [6] * 5, max_new=9)])
    while not all(row.ready for row in device.scheduler.rows) or not device.scheduler.rows:
        device.step()
    device.scheduler.forget_cache()
    device.version = 1
    device.step(budget=8)
    assert device.scheduler.recomputing
    device.step(budget=8)
    short, long = device.scheduler.rows
    assert short.sample.versions[-1] == 1
    assert 1 not in long.sample.versions


@pytest.mark.parametrize("seed", range(20))
def test_no_row_ever_reads_a_page_of_other_tokens_or_weights(seed: int) -> None:
    chance = random.Random(seed)
    device = Device(chance.choice([14, 20, 40]))
    everyone: list[Sample] = []
    for number in range(120):
        event = chance.random()
        if event < 0.3:
            ended = [sample.sequence for sample in everyone if sample.finish_reason and len(sample.sequence) < 20]
            start = chance.choice(ended) if ended and chance.random() < 0.6 else [1] * chance.choice([0, 4, 9])
            prompt = [*start, *(chance.randrange(2) for _ in range(chance.randint(1, 7)))]
            everyone += (new := samples(number, prompt, n=chance.randint(1, 3), max_new=chance.randint(1, 9)))
            device.scheduler.add(new)
        elif event < 0.35:
            device.scheduler.abort({f"r{chance.randrange(number + 1)}"})
        elif event < 0.4:
            device.scheduler.forget_cache()
            device.version += 1
        device.step(chance.choice([3, 8, 50]))
    for _ in range(3000):
        if device.scheduler.idle:
            break
        device.step()
    assert all(sample.finish_reason for sample in everyone)
    device.scheduler.publish_left()
    assert device.pool.num_free == device.pool.num_pages

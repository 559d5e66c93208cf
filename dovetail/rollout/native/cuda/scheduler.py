"""Who runs, who waits, and which pages they hold. Touches no tensors; says what must be copied, filled and decoded.

A row is ready to decode when the cache holds everything but its last token. A prompt is filled once; its samples share
its full pages and get a copy of the last, partly filled one. `num_cached` of a row counts steps that were launched but
not read yet, so it is what the cache holds at most: a stop token may have ended the row earlier.

Full pages of prompts and of sequences that leave are published (`PagePool`), and a prompt starts after what the pool
still has of it: the turns of a conversation before, a system prompt that another group has too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dovetail.rollout.native.cuda.pages import PagePool
from dovetail.rollout.native.cuda.slots import TableEntry
from dovetail.rollout.native.scheduler import Sample
from dovetail.rollout.response import of_requests

# Newcomers are let in once there is one for so many rows, so that their prompts go together (a prefill takes as long as
# several decode steps, however few they are); and when there is a slot for all and they were passed over so often.
_ROWS_PER_NEWCOMER = 16
_MOST_DELAYS = 4


@dataclass(eq=False, slots=True)
class Fill:
    """Tokens [done, end) of a sequence that have yet to go through the model; their entries go to `pages`.

    The first `num_published` pages are published, up to the prefix `node`.
    """

    sequence: list[int]
    pages: list[int]
    done: int
    end: int
    node: int
    num_published: int

    @property
    def ready(self) -> bool:
        return self.done >= self.end


@dataclass(eq=False, slots=True)
class Row:
    """A sample that holds a slot. It has pages once it has joined its prompt."""

    sample: Sample
    slot: int
    prompt: Fill
    pages: list[int] = field(default_factory=list)
    fill: Fill | None = None
    num_cached: int = 0
    started: bool = False

    @property
    def ready(self) -> bool:
        return self.fill is not None and self.fill.ready

    @property
    def steps_left(self) -> int:
        return self.sample.max_length - 1 - self.num_cached


@dataclass(frozen=True, slots=True)
class Joined:
    """What joining rows to their prompts asks of the device."""

    copies: list[tuple[int, int]]
    entries: list[TableEntry]


class PagedScheduler:
    """`reuse_prefixes` turns the search for published pages off."""

    def __init__(self, num_slots: int, pool: PagePool, *, steps_ahead: int, reuse_prefixes: bool = True) -> None:
        self.num_slots = num_slots
        self.pool = pool
        self.rows: list[Row] = []
        self.waiting: deque[Sample] = deque()
        self._steps_ahead = steps_ahead
        self._reuse_prefixes = reuse_prefixes
        self._num_delays = 0
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._prompts: dict[int, Fill] = {}
        self._waiting_of: Counter[int] = Counter()
        self._left: list[Fill] = []

    @property
    def idle(self) -> bool:
        return not self.rows and not self.waiting

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.waiting.append(sample)
            self._waiting_of[sample.group] += 1

    @property
    def recomputing(self) -> bool:
        """Whether a response that was under way waits for its cache, after a change of weights or for want of pages."""
        return any(row.sample.log_probs and not row.ready for row in self.rows)

    def admit(self) -> bool:
        """Give slots to waiting samples, as many as slots and pages allow; False if more pages would let more in."""
        num_new = min(len(self._free_slots), len(self.waiting))
        if not num_new:
            return True
        all_fit = num_new == len(self.waiting)
        if num_new < len(self.rows) // _ROWS_PER_NEWCOMER and not (all_fit and self._num_delays >= _MOST_DELAYS):
            self._num_delays += all_fit
            return True
        self.publish_left()
        promised = self._promised_pages()
        # One more page for each row that will grow: else a newcomer takes what the next steps of the others need, is
        # sent back in line at once, and is filled again and again.
        promised += sum(self._grows(row.sample) for row in self.rows)
        while self.waiting and self._free_slots:
            sample = self.waiting[0]
            prompt_pages = 0 if sample.group in self._prompts else self._prompt_pages(sample)
            own_pages = self._own_pages(sample)
            if promised + prompt_pages + own_pages > self.pool.num_free:
                return False
            promised += own_pages + self._grows(sample)
            self._enter(sample)
        self._num_delays = 0
        return True

    def fills(self) -> list[Fill]:
        """What can go through the model now, of all that must before every row can decode; in the order of the rows.

        Of several prompts that go on with the same block of tokens, all but the first wait until it is there.
        """
        seen: dict[int, Fill] = {}
        filled_next: set[tuple[int, tuple[int, ...]]] = set()
        size = self.pool.shape.page_size
        for row in self.rows:
            fill = row.prompt if row.fill is None else row.fill
            if fill.ready or id(fill) in seen:
                continue
            if row.fill is None and self._reuse_prefixes:
                self._use_published(fill)
                first = fill.num_published * size
                block = (fill.node, tuple(fill.sequence[first : first + size]))
                if fill.ready or block in filled_next:
                    continue
                if first + size <= fill.end:
                    filled_next.add(block)
            seen[id(fill)] = fill
        return list(seen.values())

    def filled(self, fill: Fill, count: int) -> None:
        """So many more tokens of it went through the model."""
        fill.done += count
        self._publish(fill)

    def join(self) -> Joined:
        """Give every row whose prompt is filled its pages."""
        joined = Joined([], [])
        size = self.pool.shape.page_size
        for row in self.rows:
            if row.fill is not None or not row.prompt.ready:
                continue
            sample = row.sample
            num_shared = row.prompt.end // size
            shared = row.prompt.pages[:num_shared]
            self.pool.share(shared)
            own = self.pool.take(self._own_pages(sample))
            row.pages = [*shared, *own]
            if row.prompt.end % size:
                joined.copies.append((row.prompt.pages[num_shared], own[0]))
            joined.entries.extend((row.slot, column, page) for column, page in enumerate(row.pages))
            row.fill = Fill(sample.sequence, row.pages, row.prompt.end, sample.num_needed, row.prompt.node, num_shared)
            row.num_cached = sample.num_needed
        self._drop_prompts()
        return joined

    def decodable(self) -> list[Row]:
        return [row for row in self.rows if row.ready and row.steps_left > 0]

    def reserve(self, rows: Collection[Row], num_steps: int) -> list[TableEntry] | None:
        """Pages for so many more tokens of each row; None when there are too few, and then none was taken."""
        wanted = []
        for row in rows:
            tokens = row.num_cached + min(num_steps, row.steps_left)
            missing = self.pool.shape.pages_for(tokens) - len(row.pages)
            if missing > 0:
                wanted.append((row, missing))
        if wanted and sum(count for _, count in wanted) > self.pool.num_free - self._promised_pages():
            if not self._left:
                return None
            self.publish_left()
            return self.reserve(rows, num_steps)
        entries = []
        for row, count in wanted:
            first = len(row.pages)
            # `fill` and the row hold one list.
            row.pages.extend(self.pool.take(count))
            entries.extend((row.slot, first + i, row.pages[first + i]) for i in range(count))
        return entries

    def leave(self, row: Row) -> None:
        """Take a row out; its slot and pages are free for others."""
        self.rows.remove(row)
        if row.fill is not None:
            if row.ready:
                row.fill.done = row.sample.num_needed
            self._left.append(row.fill)
        self._free_slots.append(row.slot)

    def publish_left(self) -> None:
        """Publish and release the pages of rows that have left. Not before somebody comes who may use them: hashing the
        tokens of a whole batch that ended takes milliseconds, and often the weights change next."""
        for fill in self._left:
            self._publish(fill)
            self.pool.release(fill.pages)
        self._left.clear()

    def requeue(self, rows: Collection[Row]) -> None:
        """Rows go back in line, first of all, in their order; what they wrote stays, their cache does not."""
        for row in rows:
            self.leave(row)
        self.waiting.extendleft(row.sample for row in reversed(list(rows)))
        self._waiting_of.update(row.sample.group for row in rows)

    def forget_cache(self, *, keep_decoding: bool = False) -> None:
        """Nothing in the cache is to be read again. Running samples go back in line, short ones first, so that these
        soon decode again. `keep_decoding` leaves those that decode as they are, with what their pages hold."""
        self.pool.forget()
        rows = [row for row in self.rows if not (keep_decoding and row.ready)]
        self.requeue(sorted(rows, key=lambda row: len(row.sample.sequence)))
        self.publish_left()
        for fill in self._prompts.values():
            self.pool.release(fill.pages)
        self._prompts.clear()

    def abort(self, request_ids: Collection[str] | None) -> int:
        samples = (*(row.sample for row in self.rows), *self.waiting)
        chosen = [sample for sample in of_requests(samples, request_ids) if sample.finish_reason is None]
        for sample in chosen:
            sample.finish_reason = "abort"
        for row in [row for row in self.rows if row.sample.finish_reason is not None]:
            self.leave(row)
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)
        self._waiting_of = Counter(sample.group for sample in self.waiting)
        self._drop_prompts()
        return len(chosen)

    def _enter(self, sample: Sample) -> None:
        self.waiting.popleft()
        self._waiting_of[sample.group] -= 1
        prompt = self._prompts.get(sample.group)
        if prompt is None:
            end = sample.num_prompt - 1
            prompt = Fill(sample.sequence[:end], [], 0, end, self.pool.root, 0)
            if self._reuse_prefixes:
                # Before any page is taken: that could evict the ones to be used.
                self._use_published(prompt)
            prompt.pages += self.pool.take(self.pool.shape.pages_for(end) - len(prompt.pages))
            self._prompts[sample.group] = prompt
        self.rows.append(Row(sample, self._free_slots.pop(), prompt))

    def _use_published(self, fill: Fill) -> None:
        """Put published pages in the place of those that would be filled next, as far as there are any."""
        size = self.pool.shape.page_size
        first = fill.num_published
        pages, fill.node = self.pool.match(fill.node, fill.sequence[first * size : fill.end])
        if pages:
            self.pool.share(pages)
            self.pool.release(fill.pages[first : first + len(pages)])
            fill.pages[first : first + len(pages)] = pages
            fill.num_published += len(pages)
            fill.done = fill.num_published * size

    def _publish(self, fill: Fill) -> None:
        if self._reuse_prefixes:
            size = self.pool.shape.page_size
            old, new = fill.num_published, fill.done // size
            fill.node = self.pool.publish(fill.node, fill.sequence[old * size : new * size], fill.pages[old:new])
            fill.num_published = new

    def _drop_prompts(self) -> None:
        """Let go of prompts that nobody will join any more."""
        joining = {id(row.prompt) for row in self.rows if row.fill is None}
        for group in [g for g, p in self._prompts.items() if id(p) not in joining and self._waiting_of[g] <= 0]:
            self.pool.release(self._prompts.pop(group).pages)
            del self._waiting_of[group]

    def _promised_pages(self) -> int:
        """Pages that rows will take when they join their prompts."""
        return sum(self._own_pages(row.sample) for row in self.rows if row.fill is None)

    def _grows(self, sample: Sample) -> bool:
        pages_for = self.pool.shape.pages_for
        return pages_for(sample.max_length - 1) > pages_for(sample.num_needed + self._steps_ahead)

    def _prompt_pages(self, sample: Sample) -> int:
        return self.pool.shape.pages_for(sample.num_prompt - 1)

    def _own_pages(self, sample: Sample) -> int:
        """Pages of a sample's own when it starts to decode: what it has, and the first steps, less the shared ones."""
        tokens = min(sample.num_needed + self._steps_ahead, sample.max_length - 1)
        return self.pool.shape.pages_for(tokens) - (sample.num_prompt - 1) // self.pool.shape.page_size

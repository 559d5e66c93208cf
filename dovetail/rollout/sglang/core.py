"""Samples and SGLang instances on one event loop: who writes when, and what happens in between.

SGLang can keep requests over a weight update only together with keys and values of the old weights. So a pause ends
what is running, with what it has written, and the rest is asked for again afterwards: caches are always empty when
weights change, no call meets an engine that is not idle, and each call's tokens belong to one version of the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from dovetail.observability.waits import waiting
from dovetail.rollout.base import EngineDiedError, EngineError, MemoryTag
from dovetail.rollout.readiness import CLOSED, DROPPED_BY_SLEEP, NO_WEIGHTS, require_usable, require_weights_awake
from dovetail.rollout.remote.router import NoServerError, Router
from dovetail.rollout.sglang.link import RefusedError, SGLangLink
from dovetail.rollout.sglang.samples import Sample, batch_body, generate_body
from dovetail.rollout.sglang.settings import Level

logger = logging.getLogger(__name__)

_ABORT_AGAIN_S = 0.3
_FLUSH_TRIES = 150
_FLUSH_PAUSE_S = 0.1
_DRAIN_S = 120.0
"""Aborted calls answer in milliseconds; SGLang is hung when they do not."""
_PAUSED_S = 1800.0
"""Whoever pauses the engine goes on within this, or is named."""
BodyOf = Callable[[int], Mapping[str, Any]]
"""The body of a call to the i-th instance."""


class Core:
    """All methods belong to one event loop. `links` are ready; `level` is how samples become calls."""

    def __init__(self, links: Sequence[SGLangLink], *, level: Level, deterministic: bool, weights_gap: str) -> None:
        self._links: dict[str, SGLangLink] = {link.name: link for link in links}
        self._router = Router(self._links)
        self._level = level
        self._deterministic = deterministic
        self.version = 0
        self.weights_gap = weights_gap
        self.paused = False
        self.closed = False
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.live: dict[str, Sample] = {}
        self._num_holds = 0
        self._num_calls = 0
        self._changed = asyncio.Condition()
        self._control = asyncio.Lock()
        # What the instances say of their weights; None until they have been told.
        self._told: str | None = None

    @property
    def links(self) -> list[SGLangLink]:
        return list(self._links.values())

    @property
    def deaths(self) -> list[str]:
        return [link.death for link in self._links.values() if link.death]

    async def finish(self, samples: Sequence[Sample]) -> None:
        """Write every sample to its end. After EngineDiedError, what is finished stays finished: call again."""
        self.check_usable()
        self.live |= {sample.rid: sample for sample in samples}
        try:
            if self._level == "batch":
                await self._finish_together(samples)
            else:
                await self._finish_each(samples)
        except asyncio.CancelledError:
            for sample in samples:
                await self._quietly("/abort_request", {"rid": sample.call_id})
            raise
        finally:
            for sample in samples:
                self.live.pop(sample.rid, None)

    async def abort(self, request_ids: Collection[str] | None) -> int:
        chosen = [
            sample
            for sample in self.live.values()
            if sample.finish_reason is None and (request_ids is None or sample.request.request_id in request_ids)
        ]
        await self._end(chosen)
        return len(chosen)

    async def pause(self) -> None:
        async with self._control:
            self.paused = True
            await self._drain()

    async def continue_(self) -> None:
        async with self._control:
            self.paused = False
            await self._notify()

    async def enter_update(self, version: int) -> None:
        """Nothing runs from here to `leave_update`."""
        self._check_alive()
        require_weights_awake(self.asleep)
        await self._control.acquire()
        try:
            self._num_holds += 1
            await self._drain()
            await self._flush()
        except BaseException:
            self._num_holds -= 1
            self._control.release()
            raise
        # Until the last tensor is in, the model is a mixture of two versions.
        self.weights_gap = f"the weight update to version {version} did not finish"

    async def leave_update(self, version: int | None) -> None:
        """Forget what the old weights computed and go on, under `version`; None: the update failed."""
        try:
            await self._flush()
            if version is not None:
                self._told = str(version)
                await self.call_all("/update_weight_version", {"new_version": self._told, "abort_all_requests": False})
                self.version, self.weights_gap = version, ""
        finally:
            self._num_holds -= 1
            self._control.release()
            await self._notify()

    async def call_all(self, route: str, body: Mapping[str, Any] | BodyOf) -> list[Any]:
        """The same call to every instance; one answer each."""
        self._check_alive()
        bodies = [body(index) if callable(body) else body for index in range(len(self._links))]
        calls = [link.call(route, one) for link, one in zip(self._links.values(), bodies, strict=True)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        _raise_first(answers)
        return list(answers)

    async def sleep(self, tags: frozenset[MemoryTag], *, on_device: bool) -> None:
        async with self._idle("sleep"):
            wanted = tags - self.asleep
            if wanted and on_device:
                await self.call_all("/release_memory_occupation", {"tags": sorted(wanted)})
            self.asleep |= tags

    async def wake(self, tags: frozenset[MemoryTag], *, on_device: bool) -> None:
        async with self._control:
            # SGLang dies of resuming what was not released.
            wanted = tags & self.asleep
            if wanted and on_device:
                await self.call_all("/resume_memory_occupation", {"tags": sorted(wanted)})
                if "weights" in wanted:
                    self.version = NO_WEIGHTS
                    self.weights_gap = DROPPED_BY_SLEEP
            self.asleep -= wanted

    async def replace(self, links: Sequence[SGLangLink], weights_gap: str) -> None:
        """New instances in place of dead ones, by position. Nothing is asleep in them, nothing was told to them."""
        self._links = {link.name: link for link in links}
        self._router = Router(self._links)
        self.asleep, self._told, self.weights_gap = frozenset(), None, weights_gap

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.paused = False
        await self._end(list(self.live.values()))
        for link in self._links.values():
            await link.close()
        await self._notify()

    def check_usable(self) -> None:
        self._check_alive()
        require_usable(self.asleep, self.weights_gap)

    def _check_alive(self) -> None:
        if self.closed:
            raise EngineError(CLOSED)
        if len(self.deaths) == len(self._links):
            raise EngineDiedError(self.deaths[0])

    async def _finish_each(self, samples: Sequence[Sample]) -> None:
        tasks = {asyncio.create_task(self._finish_one(sample)): sample for sample in samples}
        try:
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failure = next((task.exception() for task in done if task.exception() is not None), None)
            if failure is not None and not isinstance(failure, EngineDiedError):
                await self._end([tasks[task] for task in left])
            _raise_first(await asyncio.gather(*tasks, return_exceptions=True))
        finally:
            for task in tasks:
                task.cancel()

    async def _finish_one(self, sample: Sample) -> None:
        while sample.finish_reason is None:
            await self._turn([sample])
            if sample.finish_reason is None:
                sample.num_calls += 1
                with self._acquire(sample) as lease:
                    await self._on_server(
                        lease.server, [sample], generate_body(sample, deterministic=self._deterministic)
                    )

    async def _finish_together(self, samples: Sequence[Sample]) -> None:
        while True:
            await self._turn(samples)
            with ExitStack() as leases:
                groups: dict[str, list[Sample]] = {}
                for sample in samples:
                    if sample.finish_reason is None:
                        sample.num_calls += 1
                        groups.setdefault(leases.enter_context(self._acquire(sample)).server, []).append(sample)
                if not groups:
                    return
                calls = [
                    self._on_server(server, group, batch_body(group, deterministic=self._deterministic))
                    for server, group in groups.items()
                ]
                _raise_first(await asyncio.gather(*calls, return_exceptions=True))

    async def _turn(self, samples: Sequence[Sample]) -> None:
        """Wait until requests may run. Samples that were cut meanwhile end here, with what they have."""
        async with self._changed:
            while True:
                for sample in samples:
                    if sample.cut and sample.finish_reason is None:
                        sample.finish_reason = "abort"
                if all(sample.finish_reason is not None for sample in samples):
                    return
                if not self.paused and not self._num_holds:
                    break
                with waiting(f"{len(samples)} samples", "the end of a pause or weight update", limit_s=_PAUSED_S):
                    await self._changed.wait()
        self.check_usable()

    async def _on_server(self, server: str, samples: Sequence[Sample], body: Mapping[str, Any]) -> None:
        """One call for all of `samples`. A server that dies is taken out; the samples are as before then."""
        link, version = self._links[server], self.version
        self._num_calls += 1
        try:
            answer = await link.call("/generate", body)
            for sample, output in zip(samples, answer if isinstance(answer, list) else [answer], strict=True):
                self._check_version(output)
                sample.absorb(output, version)
        except EngineDiedError as error:
            logger.warning("%d samples were with a server that died: %s", len(samples), error)
            if server in self._router.servers:
                self._router.mark_down(server, str(error))
        finally:
            self._num_calls -= 1
            await self._notify()

    def _check_version(self, output: Mapping[str, Any]) -> None:
        said = output["meta_info"].get("weight_version")
        if self._told is not None and said != self._told:
            raise EngineError(
                f"SGLang wrote with weights of version {said!r}; {self._told!r} was sent. Somebody else updates this "
                "server: give the engine servers of its own."
            )

    def _acquire(self, sample: Sample) -> Any:
        try:
            # Samples of one request share a prompt, and a server that has seen it has it in its radix cache.
            return self._router.acquire(sample.request.request_id)
        except NoServerError as error:
            raise EngineDiedError(str(error)) from error

    async def _end(self, samples: Sequence[Sample]) -> None:
        """Have these end with what they have. One that SGLang has not yet heard of is asked for again."""
        for sample in samples:
            sample.cut = True
        await self._notify()
        # A call for a whole batch answers when its last sample ends: there is nothing to wait for but a second try.
        rounds = 2 if self._level == "batch" else 100
        for _ in range(rounds):
            left = [sample for sample in samples if sample.finish_reason is None and sample.rid in self.live]
            if not left:
                return
            for sample in left:
                await self._quietly("/abort_request", {"rid": sample.call_id})
            await self._wait(lambda left=left: all(sample.finish_reason is not None for sample in left))

    async def _drain(self) -> None:
        """Interrupt every call and wait until all have answered."""
        with waiting("the engine", f"{self._num_calls} aborted calls of SGLang", limit_s=_DRAIN_S) as wait:
            while self._num_calls:
                if wait.is_over():
                    raise EngineDiedError(f"SGLang hangs: {wait}; {self._num_calls} have not answered.")
                await self._quietly("/abort_request", {"abort_all": True})
                await self._wait(lambda: not self._num_calls)

    async def _flush(self) -> None:
        """Forget keys and values. Refused while a request is pending, which a request is for a moment after its end;
        an update that flushes by itself kills the server then."""
        for last in [False] * _FLUSH_TRIES + [True]:
            try:
                await self.call_all("/flush_cache", {})
            except RefusedError:
                if last:
                    raise
                await asyncio.sleep(_FLUSH_PAUSE_S)
            else:
                return

    @asynccontextmanager
    async def _idle(self, what: str) -> AsyncIterator[None]:
        """Nothing runs inside. SGLang dies of giving memory back while a request is pending."""
        async with self._control:
            self._check_alive()
            if self._num_calls and not self.paused:
                raise EngineError(f"requests are running; finish, abort or pause them before {what}.")
            await self._flush()
            yield

    async def _quietly(self, route: str, body: Mapping[str, Any]) -> None:
        """To every instance that lives. One that dies is noticed by those who wait for its answers."""
        calls = [link.call(route, body) for link in self._links.values() if not link.death]
        try:
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), _DRAIN_S)
        except TimeoutError:
            logger.warning("SGLang has not answered %s for %.0f s.", route, _DRAIN_S)

    async def _wait(self, true: Callable[[], bool]) -> None:
        """Until `true`, or a moment has passed."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(true), _ABORT_AGAIN_S)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _raise_first(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result

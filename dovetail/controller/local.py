"""`LocalWorkerGroup`: the same workers and the same calls in this process, without Ray. World size is one.

Every call runs at once in the caller's thread: a debugger steps into it, and an exception keeps its own type and
traceback. Arguments are not copied, unlike through Ray. A call that takes too long (`hangs`) is named in the log; only
the caller's process can end it, see `when_hung`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from dovetail.controller.context import WorkerContext, building
from dovetail.controller.errors import WorkerError, WorkerHungError
from dovetail.controller.futures import BatchFuture, GroupFuture
from dovetail.controller.hangs import CallLimit, CallLimits, not_finished
from dovetail.controller.host import Call, WorkerHost
from dovetail.controller.spans import Span
from dovetail.controller.worker import ClassWithInitArgs, Worker
from dovetail.controller.worker_group import Launch, WorkerGroup
from dovetail.observability.progress import progress, restart_progress
from dovetail.observability.waits import Wait, waiting


class LocalWorkerGroup(WorkerGroup):
    """A group of one. Takes what `RayWorkerGroup` takes, without the pool."""

    takes_slices = False

    def __init__(
        self, cls_with_init: ClassWithInitArgs, *, role: str | None = None, limits: CallLimits | None = None
    ) -> None:
        specs = cls_with_init.roles(role)
        title = next(iter(specs)) if len(specs) == 1 else "+".join(specs)
        self._bind(_LocalHost(specs, limits or CallLimits()), title, cls_with_init.cls)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, LocalWorkerGroup]:
        groups = {}
        for role in prefix_set:
            groups[role] = view = LocalWorkerGroup.__new__(LocalWorkerGroup)
            view._bind(self._host, role, type(self._host.worker(role)))
        return groups

    @property
    def worker(self) -> Worker:
        """The worker itself, for looking inside."""
        return self._host.worker(self.role)

    def shutdown(self) -> None:
        """Close the workers, and drop them."""
        self._host.clear()

    def when_hung(self, end: Callable[[WorkerError], None]) -> None:
        self._host.end_hung = end

    def take_spans(self) -> list[list[Span]]:
        return [self._host.take_spans()]

    def freeze_gc(self) -> None:
        """Nothing: this process belongs to the caller, who knows how long its objects live."""

    def _bind(self, host: _LocalHost, role: str, worker_cls: type[Worker]) -> None:
        super().__init__(role, worker_cls, world_size=1)
        self._host = host

    def _launch(self, launch: Launch) -> GroupFuture:
        args, kwargs = launch.arguments.of(0)
        done = _Done(self._host.run_watched(launch.call, [*args, *kwargs.values()], launch.num_rows))
        if launch.batch_ranks is None:
            return GroupFuture(done, launch.collect)
        return BatchFuture(done, launch.collect, parts=(), lazy=False)


class _LocalHost(WorkerHost):
    """Builds the workers without touching the environment or the logging of this process."""

    def __init__(self, specs: dict[str, ClassWithInitArgs], limits: CallLimits) -> None:
        super().__init__()
        self._limits = limits
        self.end_hung: Callable[[WorkerError], None] = lambda error: None
        for role, spec in specs.items():
            with building(WorkerContext(role=role)):
                self._workers[role] = spec()
        for worker in self._workers.values():
            worker.colocated = dict(self._workers)

    def worker(self, role: str) -> Worker:
        if role not in self._workers:
            raise ValueError(
                f"this process hosts no role {role!r}; it hosts {sorted(self._workers) or 'none any more'}."
            )
        return self._workers[role]

    def run_watched(self, call: Call, values: list[Any], rows: int) -> Any:
        with self._watching(call.role, call.method, rows):
            return self.run(call, values)

    @contextmanager
    def _watching(self, role: str, method: str, rows: int = 0) -> Iterator[None]:
        """Another thread names the call when it takes long, and calls `end_hung` when it takes too long."""
        limit = self._limits.limit(role, method, rows)
        restart_progress()
        hung = partial(self._hung, role, method, limit, 0)
        with waiting("the driver", f"{role}.{method}", limit_s=limit.slow_s, hung_s=limit.hung_s, on_hang=hung) as wait:
            yield
        self._limits.record(role, method, wait.waited(), rows)

    def _hung(self, role: str, method: str, limit: CallLimit, before: int, wait: Wait, stack: str) -> None:
        if (computed := progress()) != before:
            wait.hung_s = wait.waited() + limit.again_s
            wait.on_hang = partial(self._hung, role, method, limit, computed)
            return
        reason = not_finished(wait.waited(), limit, computed)
        place = {"pid": os.getpid(), "node": self._context.node}
        self.end_hung(WorkerHungError(role, 0, method, **place, reason=reason, worker_traceback=stack))

    def clear(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._workers.clear)
            for role, worker in self._workers.items():
                stack.callback(self._close, role, worker)

    def _close(self, role: str, worker: Worker) -> None:
        with self._watching(role, "close"):
            worker.close()


class _Done:
    """A call that has already run."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout: float | None = None, meanwhile: Any = None) -> dict[int, Any]:
        return {0: self._result}

    def done(self) -> bool:
        return True

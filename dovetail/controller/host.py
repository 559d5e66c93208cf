"""The process of one rank: builds the workers of its roles and runs their methods."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.controller.context import MissingGpuError, WorkerContext, building, device_index
from dovetail.controller.errors import WorkerError, describe_exception
from dovetail.controller.forwarding import take_secrets
from dovetail.controller.freeze_gc import freeze_gc
from dovetail.controller.futures import BatchSlice
from dovetail.controller.process_state import offer_stacks
from dovetail.controller.rendezvous import reserve_port, serve_store
from dovetail.controller.spans import Span, SpanRecorder
from dovetail.controller.worker import ClassWithInitArgs, Worker
from dovetail.controller.worker_logging import configure_worker_logging, logging_as
from dovetail.observability.progress import restart_progress, share_progress
from dovetail.protocol import DataProto


@dataclass(frozen=True)
class ProcessIdentity:
    """Where a rank runs."""

    pid: int
    node: str
    node_id: str
    hostname: str
    stack_file: int | None = None
    """File of the process that its Python stacks are written to on a signal, see `process_state`."""
    progress_file: int | None = None
    """File of the process that has its count, see `observability.progress`."""


@dataclass(frozen=True)
class Call:
    """One method call on one rank, without its arguments."""

    role: str
    method: str
    num_args: int
    kwarg_names: tuple[str, ...]
    keep_result: bool = True
    count_rows: bool = False
    materialize_futures: bool = True


class WorkerHost:
    """Hosts the workers of one rank. A Ray actor in `RayWorkerGroup`, a plain object in `LocalWorkerGroup`."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._context = WorkerContext()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recorder = SpanRecorder()

    def identify(self, secrets: Mapping[str, str]) -> ProcessIdentity:
        """Where this process runs, as Ray names the node. The first call: ``secrets`` are set before anything else."""
        import ray

        take_secrets(secrets)

        node_id = ray.get_runtime_context().get_node_id()
        node, hostname = ray.util.get_node_ip_address(), socket.gethostname()
        return ProcessIdentity(os.getpid(), node, node_id, hostname, offer_stacks(), share_progress())

    def serve_store(self, host: str) -> tuple[int, int]:
        """Bind the group's store in this process, and keep a second port free; only rank 0 is asked to."""
        return serve_store(host)[1], reserve_port(host)

    def build(self, context: WorkerContext, roles: Mapping[str, ClassWithInitArgs]) -> None:
        """Build the workers of this rank, in the order given."""
        self._context = context
        configure_worker_logging("+".join(roles), context.rank, context.world_size)
        try:
            os.environ.update(context.env(device_index(context)))
        except MissingGpuError as error:
            raise self._describe(error, context.role, "__init__") from None
        for role, spec in roles.items():
            with building(replace(context, role=role)), logging_as(role):
                try:
                    self._workers[role] = spec()
                except Exception as exception:  # noqa: BLE001  the process boundary: the driver raises it again
                    raise self._describe(exception, role, "__init__") from None
            if not hasattr(self._workers[role], "context"):
                raise TypeError(f"{spec.cls.__name__}.__init__ must call super().__init__() of Worker.")
        for worker in self._workers.values():
            worker.colocated = dict(self._workers)

    def take_spans(self) -> list[Span]:
        """The calls since the last time this was asked."""
        return self._recorder.take()

    def freeze_gc(self) -> None:
        """The process belongs to the group: what lives in it now lives until it ends."""
        freeze_gc()

    def call(self, call: Call, *values: Any) -> Any:
        """Run a method; what it raises leaves this process as a `WorkerError`."""
        restart_progress()
        try:
            return self.run(call, values)
        except WorkerError:
            raise
        except Exception as exception:  # noqa: BLE001  the process boundary: the driver raises it again
            upstream = _upstream_error(exception)
            raise upstream or self._describe(exception, call.role, call.method) from None

    def run(self, call: Call, values: Sequence[Any]) -> Any:
        """Run a method; its exceptions pass through as they are."""
        if call.materialize_futures:
            values = [value.get() if isinstance(value, BatchSlice) else value for value in values]
        kwargs = dict(zip(call.kwarg_names, values[call.num_args :], strict=True))
        with logging_as(call.role), self._recorder.recording(call.role, call.method):
            result = getattr(self._workers[call.role], call.method)(*values[: call.num_args], **kwargs)
            if inspect.iscoroutine(result):
                self._loop = self._loop or asyncio.new_event_loop()
                result = self._loop.run_until_complete(result)
        # The other ranks of a data-parallel rank hold the same result: keeping one copy is enough.
        result = result if call.keep_result else None
        if not call.count_rows:
            return result
        return result, len(result) if isinstance(result, DataProto) else 0

    def _describe(self, exception: BaseException, role: str, method: str) -> WorkerError:
        context = self._context
        return describe_exception(exception, role, context.rank, method, pid=os.getpid(), node=context.node)


def _upstream_error(exception: BaseException) -> WorkerError | None:
    """The error of the call that should have made our argument, when that is why this one failed."""
    cause = getattr(exception, "cause", None)
    return cause if isinstance(cause, WorkerError) else None

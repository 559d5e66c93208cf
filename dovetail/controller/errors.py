"""Errors of workers, with what a person needs to act on them. They carry text, never live objects of the worker."""

from __future__ import annotations

import pickle
import traceback
from types import TracebackType


class WorkerError(RuntimeError):
    """A call on a worker failed. Names the role, the rank, the method and holds the worker's own traceback.

    ``exception`` is the original exception when it survives pickling (so ``except`` clauses can look at its type),
    else ``None``; ``worker_traceback`` is always there as text.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        method: str,
        *,
        pid: int | None = None,
        node: str | None = None,
        reason: str = "",
        worker_traceback: str = "",
        exception: BaseException | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.method = method
        self.pid = pid
        self.node = node
        self.reason = reason
        self.worker_traceback = worker_traceback
        self.exception = exception
        self.was_raised = False
        """Whether some call has raised it; a death is raised once by those who only hear of it."""
        super().__init__(self._message())

    def _message(self) -> str:
        text = f"{self.role}[rank {self.rank}].{self.method} failed in {self.place}: {self.reason}"
        if self.worker_traceback:
            text += f"\n\nTraceback on {self.role}[rank {self.rank}]:\n{self.worker_traceback.rstrip()}"
        return text

    @property
    def place(self) -> str:
        """The process, in words: ``pid 4711 on node 10.0.0.3``."""
        return f"pid {self.pid if self.pid is not None else 'unknown'} on node {self.node or 'unknown'}"

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.__dict__.copy())


class WorkerDiedError(WorkerError):
    """The process of a worker is gone (killed, out of memory, node lost). ``method`` is what it was running."""

    def _message(self) -> str:
        doing = f"while running {self.method!r}" if self.method else "between calls"
        text = f"{self.role}[rank {self.rank}] died ({self.place}) {doing}; its group was stopped. {self.reason}"
        return text.rstrip()


class WorkerHungError(WorkerDiedError):
    """A worker exists and does not go on: it is stopped, or far beyond the time of its call. It was killed."""

    def _message(self) -> str:
        doing = f"in {self.method!r}" if self.method else "between calls"
        text = (
            f"{self.role}[rank {self.rank}] hangs ({self.place}) {doing}; its group was stopped. {self.reason}".rstrip()
        )
        if self.worker_traceback:
            text += f"\n\nStacks of {self.role}[rank {self.rank}]:\n{self.worker_traceback.rstrip()}"
        return text


def describe_exception(
    exception: BaseException, role: str, rank: int, method: str, *, pid: int, node: str
) -> WorkerError:
    """Turn an exception raised by a worker's own code into the error that travels to the driver."""
    reason = "".join(traceback.format_exception_only(exception)).strip()
    text = "".join(traceback.format_exception(type(exception), exception, _from_the_workers_code(exception)))
    return WorkerError(
        role,
        rank,
        method,
        pid=pid,
        node=node,
        reason=reason,
        worker_traceback=text,
        exception=exception if _survives_pickling(exception) else None,
    )


def _from_the_workers_code(exception: BaseException) -> TracebackType | None:
    """The traceback without the frames that led to the worker's method: the reader knows how it was called."""
    frames = exception.__traceback__
    while frames is not None:
        module = frames.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(("dovetail.controller.", "ray.")):
            return frames
        frames = frames.tb_next
    return exception.__traceback__


def _survives_pickling(exception: BaseException) -> bool:
    try:
        # An object of this process, there and back: nothing from outside is unpickled.
        return type(pickle.loads(pickle.dumps(exception))) is type(exception)
    except Exception:  # noqa: BLE001  any class may define any __reduce__; failing to pickle only costs the `exception` field
        return False


def _rebuild(cls: type[WorkerError], state: dict) -> WorkerError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = (error._message(),)
    return error
